"""Running both sides: their inputs and outputs, torch modes, emulated matrix units."""

TRANSFORMS = ("eager", "jit", "grad", "vmap", "remat")
"""The ways to run a port through JAX; listed here so that reading them imports no framework."""
