"""One container, from its image to its one end."""
