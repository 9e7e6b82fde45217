"""Evaluation harness and statistics."""
