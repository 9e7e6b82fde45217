"""Built-in environments and tiny models: a folder each, with everything of its own."""
