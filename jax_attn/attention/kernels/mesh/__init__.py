"""A call on a mesh of devices, cut along batch and heads."""
