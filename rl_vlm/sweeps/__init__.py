"""Sweeps: many runs of one configuration as trials of Ray Tune, and what came out of them."""
