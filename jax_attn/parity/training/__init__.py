"""Training in both frameworks, compared update by update."""
