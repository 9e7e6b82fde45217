"""The reward model: an ensemble of networks, the examples that it is trained on, and its training."""
