"""Held-out evaluation: its tasks and its metrics. No Ray here."""
