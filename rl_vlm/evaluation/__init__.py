"""Held-out evaluation: which tasks to run, and what their results mean. No Ray here."""
