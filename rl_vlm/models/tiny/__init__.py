"""The tiny offline VLM: built and warm-started from code, in about a minute."""
