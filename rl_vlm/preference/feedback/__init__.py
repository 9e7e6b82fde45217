"""Labelling sessions: which segments are asked about, the labeller's answers, and what is learned from them."""
