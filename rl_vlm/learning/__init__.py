"""Advantages, losses, token log-probabilities, batching, the VLM module and learner."""
