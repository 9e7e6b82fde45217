"""Vision environments: the interface, their registry, data sets, images, and environments from elsewhere
(`foreign/`)."""
