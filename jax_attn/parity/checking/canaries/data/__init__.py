"""Canaries of a port's data: its inputs, its weights, and outputs that it keeps."""
