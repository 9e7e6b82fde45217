"""How much memory a run needs on a GPU, by arithmetic from the model's configuration: no weights, no torch."""
