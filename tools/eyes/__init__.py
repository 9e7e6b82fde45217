"""Builds the model `eyes` that comes with the package; see README.md."""
