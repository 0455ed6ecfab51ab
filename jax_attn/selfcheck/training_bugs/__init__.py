"""Bugs beside those of attention: of optimizers, and of the other layers of an encoder."""
