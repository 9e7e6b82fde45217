"""Engines that sample from a VLM behind one protocol. No Ray here."""
