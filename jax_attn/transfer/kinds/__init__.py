"""Ports that are not NNX modules, each kind held as one; the kinds are told by what they are."""
