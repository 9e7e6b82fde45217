"""Stands in for the package `vagen`, which needs verl and a GPU, where it is not installed."""
