"""Drawn scenes and their descriptions, which NLVR2-v0 and Caption-v0 share."""
