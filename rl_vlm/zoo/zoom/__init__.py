"""Zoom-v0: look closer with a tool before answering."""
