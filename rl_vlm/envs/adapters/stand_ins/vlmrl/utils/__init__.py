"""Stands in for `vlmrl.utils`: what an environment's file calls."""
