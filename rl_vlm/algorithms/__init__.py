"""Algorithms: what they share in `base.py`, the policy loop in `policy.py`, then one file each, and their
checkpoints."""
