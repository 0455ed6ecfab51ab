"""A table proposed from the names and shapes of two modules."""
