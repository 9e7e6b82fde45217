"""Vision environments: the interface, their registry, data sets, images, and foreign environments."""
