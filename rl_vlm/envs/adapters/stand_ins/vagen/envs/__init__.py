"""Stands in for `vagen.envs`: the base classes of its environments."""
