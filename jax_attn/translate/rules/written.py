"""Functions that torch has and JAX has not; a translated file contains the source of those it uses.

Each stands alone: it uses `jax`, `jnp` and other functions of this file, nothing else.
"""

import jax
import jax.numpy as jnp
from jax import Array


def clamp(x: Array, low: Array | float | None = None, high: Array | float | None = None) -> Array:
    """Limit x; its gradient passes where x equals a limit."""
    if low is not None:
        x = jnp.where(x < low, low, x)
    if high is not None:
        x = jnp.where(x > high, high, x)
    return x


def safe_sqrt(x: Array) -> Array:
    """Return the square root, with gradient 0 at 0."""
    return jnp.where(x == 0, 0, jnp.sqrt(jnp.where(x == 0, 1, x)))


def safe_softmax(x: Array, axis: int = -1) -> Array:
    """Return the softmax, with 0 for a row that is -inf everywhere."""
    empty = jnp.isneginf(x).all(axis, keepdims=True)
    return jnp.where(empty, 0, jax.nn.softmax(jnp.where(empty, 0, x), axis))
