"""Planted bugs: what goes wrong, which rows claim to see it, and which did."""
