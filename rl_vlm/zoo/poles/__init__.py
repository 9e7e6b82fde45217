"""Pictures of poles and the tiny labeller that compares them."""
