"""The tiny model that says what it is asked to say: its words and its lessons."""
