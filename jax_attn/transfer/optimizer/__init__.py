"""Conversion of optimizer state through a table, between torch.optim and optax."""
