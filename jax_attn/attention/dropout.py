"""Dropout whose mask the caller may provide, so that two frameworks can be compared."""

import copy
import functools
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry2x32_p
from jaxtyping import Array, Bool, Float

from jax_attn.attention import checks, meshes
from jax_attn.attention.annotations import AnyArray
from jax_attn.attention.broadcasting import broadcasting


class WeightPlace(NamedTuple):
    """Position of a part (B, N, T, S) of attention weights in the whole; it has all S columns.

    b, n: the part's first batch row and head. N: the number of heads of the whole.
    """

    b: AnyArray
    n: AnyArray
    N: AnyArray

    def rows(self, b: jax.Array, n: jax.Array, t: jax.Array, T: int) -> jax.Array:
        """Return, as uint32, the whole's row index of each row of the part; see `Dropout.drawn`."""
        return (((b + self.b) * self.N + n + self.n) * T + t).astype(jnp.uint32)


@jax.tree_util.register_pytree_with_keys_class
class Dropout:
    """Dropout: sets elements to 0 with probability `rate` and scales the others by 1/(1 − rate).

    Give either `key` or `keep`. Srivastava et al., 2014, in the inverted form that torch and flax
    use.

    Args:
      rate: a static number in [0, 1]. 0 changes nothing; 1 gives zeros.
      key: a jax.random key. Whether an element is kept depends only on the key and on its position,
        so a kernel that works block by block drops the same elements as any other.
      keep: a boolean array, True = kept, that broadcasts to the array: (B, N, T, S) for attention
        weights.
    """

    def __init__(
        self,
        rate: float,
        *,
        key: jax.Array | None = None,
        keep: Bool[AnyArray, "*#dropped"] | None = None,
    ):
        problems = checks.rate_problems(rate=rate)
        if (key is None) == (keep is None):
            problems.append(f"expected key or keep, got {'neither' if key is None else 'both'}")
        problems += [] if key is None else checks.key_problems(key)
        if keep is not None and not (checks.is_array(keep) and str(keep.dtype) == "bool"):
            got = checks.summary(keep)
            problems.append(f"keep: expected a boolean array, True = kept, got {got}")
        checks.raise_all("Dropout", problems)
        self.rate = float(rate)
        self.key, self.keep = key, keep
        self.place: WeightPlace | None = None

    def within(self, place: WeightPlace) -> "Dropout":
        """Return the dropout of a part of the attention weights, equal to the whole's there."""
        part = copy.copy(self)
        part.place = place
        return part

    @broadcasting
    def apply(self, x: Float[Array, "*dropped"], first: int = 0) -> Float[Array, "*dropped"]:
        """Return x with dropout, in x's dtype.

        Args:
          x: the array to drop elements from.
          first: the first column that x holds, if it holds only some consecutive columns.
        """
        if self.rate == 0:
            return x
        if self.rate == 1:
            return jnp.zeros_like(x)
        keep = self.keep
        if keep is None:
            columns = jnp.arange(first, first + x.shape[-1], dtype=jnp.uint32)
            keep = self.drawn(self._rows(*x.shape[:-1]), columns)
        elif keep.ndim and keep.shape[-1] > x.shape[-1]:
            keep = keep[..., first : first + x.shape[-1]]
        return self.where(keep, x)

    def _rows(self, *shape: int) -> jax.Array:
        """Return the row index of each element of an array (*shape, columns); shape (*shape, 1)."""
        if self.place is None:
            return jnp.arange(math.prod(shape), dtype=jnp.uint32).reshape(*shape, 1)
        b, n, t = jnp.indices(shape, jnp.int32)[..., None]
        return self.place.rows(b, n, t, shape[-1])

    def drawn(self, rows: jax.Array, columns: jax.Array) -> jax.Array:
        """Return which elements are kept, at these rows and columns.

        rows, columns: uint32, broadcast together. An element's row is the flat index of its leading
        axes (for (B, N, T, S): (b·N + n)·T + t, modulo 2³²), its column the index on the last.
        """
        assert self.key is not None, "a mask that the caller provided is not drawn"
        words = jax.random.bits(self.key, (2,), jnp.uint32)
        operands = jnp.broadcast_arrays(*words, rows, columns)
        # Inside a shard_map the operands must vary along the same axes: `zero` varies along all.
        zero = functools.reduce(jnp.bitwise_or, (x ^ x for x in operands))
        # The primitive is elementwise. threefry_2x32 ravels, which takes communication in a mesh.
        hashed, _ = threefry2x32_p.bind(*(x ^ zero for x in operands))
        limit = np.uint32(min(round((1 - self.rate) * 2**32), 2**32 - 1))
        return hashed < limit

    def where(self, keep: AnyArray, x: jax.Array) -> jax.Array:
        """Return x / (1 − rate) where keep is True, else 0. Expects 0 < rate < 1."""
        if (mesh := meshes.explicit_mesh(x)) is not None:
            keep = jnp.broadcast_to(keep, x.shape)
            keep = meshes.placed(keep, mesh, jax.typeof(x).sharding.spec)
        return jnp.where(keep, x / (1 - self.rate), jnp.zeros_like(x))

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], float]:
        names = ("key", "keep", "place")
        return [(jax.tree_util.GetAttrKey(n), getattr(self, n)) for n in names], self.rate

    @classmethod
    def tree_unflatten(cls, rate: float, leaves: Iterable[Any]) -> "Dropout":
        # Not through __init__: jax puts placeholders where arrays were.
        dropout = object.__new__(cls)
        dropout.rate = rate
        dropout.key, dropout.keep, dropout.place = leaves
        return dropout
