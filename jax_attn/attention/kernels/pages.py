"""The pages that a cache lies in, and how tokens are written into one.

A page and the new tokens have the same axes, B first; along `axis` the page has P places and
there are T tokens. What does not belong into the page leaves it as it is.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class PageSizes:
    """How the pages of a cache are cut, and how much of one is worked on at a time.

    first: the places of the first page. Each later page is as large as all before it. A step reads
    those that hold something, whole, as XLA:CPU multiplies by an array at twice the speed at which
    it first cuts the filled part out of one; so it reads at most twice what is filled.
    few_tokens: so many tokens are written one by one; of more, all that a page holds at once.
    query_tile: the scores of so many queries at a time are written out.
    """

    first: int = 512
    few_tokens: int = 16
    query_tile: int = 64

    def places(self, length: int) -> list[int]:
        """How many places each page of a cache for `length` tokens a row has."""
        places: list[int] = []
        while sum(places) < length:
            places.append(min(max(sum(places), self.first), length - sum(places)))
        return places


DEFAULT = PageSizes()


def token_by_token(page, tokens, axis: int, *, at_BT) -> jax.Array:
    """The page with each token at its place, in place; at_BT: below 0 or from P on, not here.

    Not a scatter: XLA would first turn the whole page round for it.
    """
    B, T, P = page.shape[0], tokens.shape[axis], page.shape[axis]
    here_BT = (at_BT >= 0) & (at_BT < P)
    at_BT = jnp.clip(at_BT, 0, P - 1)

    def one(n, page):
        b, t = n.astype(jnp.int32) // T, n.astype(jnp.int32) % T
        old, new = _token(page, b, at_BT[b, t], axis), _token(tokens, b, t, axis)
        new = jnp.where(here_BT[b, t], new, old)
        return jax.lax.dynamic_update_slice(page, new, _corner(page, b, at_BT[b, t], axis))

    return jax.lax.fori_loop(0, B * T, one, page)


def _token(x, b, at, axis: int) -> jax.Array:
    shape = [1 if i in (0, axis) else n for i, n in enumerate(x.shape)]
    return jax.lax.dynamic_slice(x, _corner(x, b, at, axis), shape)


def _corner(x, b, at, axis: int) -> list:
    return [{0: b, axis: at}.get(i, jnp.int32(0)) for i in range(x.ndim)]


def place_by_place(page, tokens, axis: int, *, step_BP) -> jax.Array:
    """Likewise, every place at once, where any is written; step_BP: its token, below 0 for none."""
    shape = [n if i in (0, axis) else 1 for i, n in enumerate(page.shape)]

    def written(page):
        new = jnp.take_along_axis(tokens, jnp.maximum(step_BP, 0).reshape(shape), axis)
        return jnp.where(step_BP.reshape(shape) >= 0, new, page)

    return jax.lax.cond((step_BP >= 0).any(), written, lambda page: page, page)
