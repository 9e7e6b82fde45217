"""Reward functions: pure, tested against gaming."""
