"""Geo3k-v0: geometry problems with figures."""
