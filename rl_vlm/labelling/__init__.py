"""Preference labels: what a labeller is asked, who answers, how answers are read and kept."""
