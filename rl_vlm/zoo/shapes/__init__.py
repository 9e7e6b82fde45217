"""Shapes-v0: count drawn shapes, with or without a tool."""
