"""Figures and videos from the files of runs, ours and those of the originals."""
