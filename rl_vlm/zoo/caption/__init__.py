"""Caption-v0: describe a picture."""
