"""Runs: from a configuration to a run folder, whatever happens in between."""
