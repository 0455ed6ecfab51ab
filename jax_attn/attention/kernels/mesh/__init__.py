"""Calls on a mesh of devices, sharded along batch and heads."""
