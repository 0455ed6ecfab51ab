"""Bugs outside attention: those of optimizers, and of the other layers of an encoder."""
