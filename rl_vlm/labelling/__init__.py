"""Preference labels: what a labeller is asked, who answers, and how answers are read and stored."""
