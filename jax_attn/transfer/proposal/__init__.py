"""Proposal of a table from the names and shapes of two modules."""
