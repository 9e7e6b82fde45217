"""Environments written to other frameworks' interfaces, unchanged: one file per interface; `interfaces.py` is the list."""
