"""Stepping control environments: collection, evaluation episodes, and the log of finished episodes."""
