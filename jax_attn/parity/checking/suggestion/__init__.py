"""Inputs that a reference's own signature and settings suggest, tried on it."""
