"""Identification of a checkpoint, only from its headers and its config."""
