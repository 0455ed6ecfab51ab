"""Both sides run: inputs and outputs, torch modes, emulated matrix units."""

TRANSFORMS = ("eager", "jit", "grad", "vmap", "remat")
"""How a port can be run through JAX, without a framework imported."""
