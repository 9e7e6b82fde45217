"""Stands in for `vlmrl.envs`: what an environment's file derives from."""
