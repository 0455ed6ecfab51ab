"""Suggest inputs from a reference's own signature and settings, and try them on it."""
