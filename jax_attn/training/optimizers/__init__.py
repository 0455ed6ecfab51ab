"""What equals a torch optimizer and its scheduler in optax."""
