"""Conversion of whole checkpoints from one framework to the other."""
