"""Canaries of what a port is given: inputs, buffers, and what it keeps of them."""
