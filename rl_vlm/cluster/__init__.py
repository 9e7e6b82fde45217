"""How clusters are described: the values that people change, and the manifests that are rendered from them."""
