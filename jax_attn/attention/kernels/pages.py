"""How tokens are written into a page of a cache.

A page and the new tokens have the same axes, B first; along `axis` the page has P places and
there are T tokens. Places that no token belongs to stay as they are.
"""

import jax
import jax.numpy as jnp


def token_by_token(page: jax.Array, tokens: jax.Array, axis: int, *, at_BT: jax.Array) -> jax.Array:
    """The page with each token written in its place, at_BT; outside [0, P) it is not in this page.

    Not a scatter: XLA would first turn the whole page round for it.
    """
    B, T, P = page.shape[0], tokens.shape[axis], page.shape[axis]
    here_BT = (at_BT >= 0) & (at_BT < P)
    at_BT = jnp.clip(at_BT, 0, P - 1)

    def write(n: jax.Array, page: jax.Array) -> jax.Array:
        b, t = n.astype(jnp.int32) // T, n.astype(jnp.int32) % T
        old, new = _token(page, b, at_BT[b, t], axis), _token(tokens, b, t, axis)
        new = jnp.where(here_BT[b, t], new, old)
        return jax.lax.dynamic_update_slice(page, new, _corner(page, b, at_BT[b, t], axis))

    return jax.lax.fori_loop(0, B * T, write, page)


def _token(x: jax.Array, b: jax.Array, at: jax.Array, axis: int) -> jax.Array:
    shape = [1 if i in (0, axis) else n for i, n in enumerate(x.shape)]
    return jax.lax.dynamic_slice(x, _corner(x, b, at, axis), shape)


def _corner(x: jax.Array, b: jax.Array, at: jax.Array, axis: int) -> list[jax.Array]:
    return [{0: b, axis: at}.get(i, jnp.int32(0)) for i in range(x.ndim)]


def place_by_place(
    page: jax.Array, tokens: jax.Array, axis: int, *, step_BP: jax.Array
) -> jax.Array:
    """The page with all its places written in one operation, skipped if none changes.

    step_BP: which token belongs to each place, below 0 for none.
    """
    shape = [n if i in (0, axis) else 1 for i, n in enumerate(page.shape)]

    def written(page: jax.Array) -> jax.Array:
        new = jnp.take_along_axis(tokens, jnp.maximum(step_BP, 0).reshape(shape), axis)
        return jnp.where(step_BP.reshape(shape) >= 0, new, page)

    return jax.lax.cond((step_BP >= 0).any(), written, lambda page: page, page)
