"""NLVR2-v0: decide whether a sentence is true of two pictures."""
