"""Rewards from a vision-language model's preferences: labels, reward ensemble, replay, SAC."""
