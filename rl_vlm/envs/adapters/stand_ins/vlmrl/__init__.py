"""Stands in for vlm-gym's package `vlmrl`, which needs JAX, where it is not installed."""
