"""The tiny offline vision-language model and its variants: built and warm-started from code."""
