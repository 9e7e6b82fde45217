"""Env runners: many episodes at once against the served policy."""
