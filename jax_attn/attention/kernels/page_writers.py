"""Write new tokens into a page of a cache.

A page and the new tokens have the same axes, B first; along `axis` the page has P places and there
are T tokens. Places without a new token keep their content.
"""

import jax
import jax.numpy as jnp


def token_by_token(at_BT: jax.Array, page: jax.Array, tokens: jax.Array, axis: int) -> jax.Array:
    """Write each token in its place at_BT of the page; skip places below 0.

    Not a scatter, for which XLA would first transpose the whole page.
    """
    B, T = page.shape[0], tokens.shape[axis]

    def write(n: jax.Array, page: jax.Array) -> jax.Array:
        n = jnp.asarray(n, jnp.int32)  # as in Tile.row
        b, t = n // T, n % T
        at = jnp.maximum(at_BT[b, t], 0)
        old, new = _token(page, b, at, axis), _token(tokens, b, t, axis)
        new = jnp.where(at_BT[b, t] >= 0, new, old)
        return jax.lax.dynamic_update_slice(page, new, _corner(page, b, at, axis))

    return jax.lax.fori_loop(0, B * T, write, page)


def _token(x: jax.Array, b: jax.Array, at: jax.Array, axis: int) -> jax.Array:
    shape = [1 if i in (0, axis) else n for i, n in enumerate(x.shape)]
    return jax.lax.dynamic_slice(x, _corner(x, b, at, axis), shape)


def _corner(x: jax.Array, b: jax.Array, at: jax.Array, axis: int) -> list[jax.Array]:
    return [{0: b, axis: at}.get(i, jnp.int32(0)) for i in range(x.ndim)]


def place_by_place(step_BP: jax.Array, page: jax.Array, tokens: jax.Array, axis: int) -> jax.Array:
    """Write all places of the page in one operation.

    step_BP: the token for each place, below 0 for none.
    """
    shape = [n if i in (0, axis) else 1 for i, n in enumerate(page.shape)]
    new = jnp.take_along_axis(tokens, jnp.maximum(step_BP, 0).reshape(shape), axis)
    return jnp.where(step_BP.reshape(shape) >= 0, new, page)
