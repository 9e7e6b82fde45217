"""Algorithms: their base, the policy loop, then one file each; checkpoints."""
