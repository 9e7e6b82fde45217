"""Sampling: task sources, episodes, env runners and their supervision, the groups that a learner may use."""
