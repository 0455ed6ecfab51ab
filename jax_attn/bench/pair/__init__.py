"""Time a user's own torch module and its port, side by side."""
