"""Functions that torch has and JAX has not; a translated file contains the source of those it uses.

Each stands alone: it uses `jax`, `jnp` and other functions of this file, nothing else.
"""
