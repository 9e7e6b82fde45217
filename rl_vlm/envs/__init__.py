"""Vision environments: the interface, the registry and one file per environment."""
