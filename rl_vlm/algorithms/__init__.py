"""Algorithms: one file each."""
