"""The replay buffer: steps, and the pictures of the newest of them."""
