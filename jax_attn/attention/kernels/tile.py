"""A tile of the scores: some heads of one batch row, some queries, some keys.

Tiles are cut out of the arrays as they lie, (B, T, N, H), and nothing is padded: a tile that
would reach over an edge is moved back inside, over its neighbour, and the queries and keys
before its `own` first ones are the neighbour's.
"""

import functools
from dataclasses import dataclass, replace
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_attn.attention.annotations import AnyArray
from jax_attn.attention.call import Call
from jax_attn.attention.integers import FAR
from jax_attn.attention.mask import Band, Mask


@dataclass(frozen=True)
class Tiles:
    """A tile's key/value heads K, with their K·G query heads, its queries T and its keys S.

    K divides the call's; T and S are cut down to the call's.
    """

    K: int
    T: int
    S: int

    def within(self, call: Call) -> "Tiles":
        """Tiles no larger than the call."""
        return Tiles(self.K, min(self.T, call.T), min(self.S, call.S))


@dataclass(frozen=True)
class Tile:
    """Where a tile of `call` lies: batch row b, first key/value head k, query t and key s.

    own_t, own_s: the first query and key that no tile before it has.
    """

    call: Call
    sizes: Tiles
    b: jax.Array
    k: jax.Array
    t: jax.Array
    own_t: jax.Array
    s: jax.Array
    own_s: jax.Array
    # The fields that `mask` moves to a tile.
    MASK: ClassVar = ("lo", "hi", "kv_lengths", "q_segments", "kv_segments", "allowed")

    @classmethod
    def row(cls, call: Call, sizes: Tiles, n: jax.Array) -> "Tile":
        """The n-th over batch, heads and queries."""
        heads, queries = call.K // sizes.K, -(-call.T // sizes.T)
        n = n.astype(jnp.int32)  # int64 under x64
        own_t = n % queries * sizes.T
        t = jnp.minimum(own_t, call.T - sizes.T)
        b, k, start = n // (heads * queries), n // queries % heads * sizes.K, jnp.int32(0)
        return cls(call, sizes, b=b, k=k, t=t, own_t=own_t, s=start, own_s=start)

    def column(self, j: jax.Array) -> "Tile":
        """The j-th over the keys, in this row."""
        own_s = j.astype(jnp.int32) * self.sizes.S
        return replace(self, s=jnp.minimum(own_s, self.call.S - self.sizes.S), own_s=own_s)

    def queries(self, x_BTNH: jax.Array) -> jax.Array:
        """(B, T, N, H) → the tile's (K, G, T, H)."""
        x_TNH = self._cut(x_BTNH, "BTN")[0]
        return x_TNH.reshape(self.sizes.T, self.sizes.K, self.call.G, -1).transpose(1, 2, 0, 3)

    def keys(self, x_BSKH: jax.Array) -> jax.Array:
        """(B, S, K, H) → the tile's (K, S, H)."""
        return self._cut(x_BSKH, "BSK")[0].swapaxes(0, 1)

    def rows(self, x_BNT: jax.Array) -> jax.Array:
        """(B, N, T) → the tile's (K, G, T)."""
        return self._cut(x_BNT, "BNT").reshape(self.sizes.K, self.call.G, self.sizes.T)

    def scores(self, x: AnyArray) -> jax.Array:
        """What broadcasts to (B, N, T, S) → what broadcasts to the tile's (K, G, T, S)."""
        return self._grouped(self._cut(x, "BNTS"[4 - x.ndim :]))

    def places(self) -> tuple[jax.Array, jax.Array]:
        """uint32 rows (K, G, T, 1) and columns (S,) of the scores, as `Dropout.drawn` counts."""
        call, sizes = self.call, self.sizes
        n_KG11 = self.k * call.G + _count(sizes.K * call.G).reshape(sizes.K, call.G, 1, 1)
        rows = (self.b * call.N + n_KG11) * call.T + self.t + _count(sizes.T)[:, None]
        return rows.astype(jnp.uint32), (self.s + _count(sizes.S)).astype(jnp.uint32)

    def mask(self) -> Mask:
        """The mask as this tile's queries and keys see it, numbered from 0; of one batch row."""
        whole = self.call.mask

        def moved(x: Band | None, by: jax.Array) -> jax.Array | None:
            if x is None or isinstance(x, int):
                return x if x is None else x - by
            # What lies further off than any tile may not wrap around when the tile's place is
            # subtracted; a plain number does not reach so far.
            return jnp.clip(jnp.broadcast_to(x, self.call.B)[self.b], -FAR, FAR) - by

        def cut(x: AnyArray | None, axes: str) -> jax.Array | None:
            return None if x is None else self._cut(jnp.asarray(x), axes[len(axes) - x.ndim :])

        return Mask(
            lo=moved(whole.lo, self.s - self.t),
            hi=moved(whole.hi, self.s - self.t),
            kv_lengths=moved(whole.kv_lengths, self.s),
            q_segments=cut(whole.q_segments, "BT"),
            kv_segments=cut(whole.kv_segments, "BS"),
            allowed=cut(whole.allowed, "BNTS"),
        )

    def own(self) -> jax.Array:
        """(T,): which queries no tile before this one has."""
        return _count(self.sizes.T) >= self.own_t - self.t

    def allowed(self) -> jax.Array | None:
        """What broadcasts to (K, G, T, S), True = attend; None where all of the tile may.

        Keys that are another tile's may not be attended to.
        """
        call, sizes = self.call, self.sizes
        conditions = []
        if not call.mask.is_open:
            conditions.append(self._grouped(self.mask().materialize(sizes.T, sizes.S)))
        if call.S % sizes.S:
            conditions.append(_count(sizes.S) >= self.own_s - self.s)
        return functools.reduce(jnp.logical_and, conditions) if conditions else None

    def reach(self) -> tuple[jax.Array | np.int32, jax.Array | np.int32]:
        """The first column of tiles in this row in which a key may be visible, and the end.

        By band, lengths and segments; an array of booleans is not searched. Segments that are
        sorted, as packed sequences are, leave out every tile of other sequences.
        """
        columns, size = -(-self.call.S // self.sizes.S), self.sizes.S
        mask, first = self.mask(), _count(columns) * size
        may = []
        if mask.lo is not None:
            may.append(first + (size - 1) >= mask.lo)
        if mask.hi is not None:
            may.append(first <= mask.hi + (self.sizes.T - 1))
        if mask.kv_lengths is not None:
            may.append(first < mask.kv_lengths)
        if mask.q_segments is not None:
            every = self.call.mask.kv_segments
            ids_S = jnp.broadcast_to(jnp.asarray(every), (self.call.B, self.call.S))[self.b]
            ids = jnp.pad(ids_S, (0, columns * size - self.call.S), mode="edge")
            ids = ids.reshape(columns, size)
            may.append(ids.min(axis=1) <= mask.q_segments.max())
            may.append(ids.max(axis=1) >= mask.q_segments.min())
        if not may:
            return np.int32(0), np.int32(columns)
        seen = functools.reduce(jnp.logical_and, may)
        end = jnp.where(seen.any(), columns - jnp.argmax(seen[::-1]), 0)
        return jnp.argmax(seen).astype(jnp.int32), end.astype(jnp.int32)

    def put_queries(self, x_BTNH: jax.Array, new_KGTH: jax.Array) -> jax.Array:
        new = new_KGTH.transpose(2, 0, 1, 3).reshape(1, self.sizes.T, -1, new_KGTH.shape[-1])
        return lax.dynamic_update_slice(
            x_BTNH, new.astype(x_BTNH.dtype), self._start(x_BTNH.shape, "BTN")
        )

    def add_keys(self, x_BSKH: jax.Array, more_KHS: jax.Array) -> jax.Array:
        sum_SKH = self._cut(x_BSKH, "BSK")[0] + more_KHS.transpose(2, 0, 1)
        return lax.dynamic_update_slice(x_BSKH, sum_SKH[None], self._start(x_BSKH.shape, "BSK"))

    def put_rows(self, x_BNT: jax.Array, new_KGT: jax.Array) -> jax.Array:
        new = new_KGT.reshape(1, -1, self.sizes.T)
        return lax.dynamic_update_slice(x_BNT, new, self._start(x_BNT.shape, "BNT"))

    def add_scores(self, x: jax.Array, more: jax.Array) -> jax.Array:
        """Adds to what `scores` cuts out of x something of that shape."""
        axes = "BNTS"[4 - x.ndim :]
        here = self._cut(x, axes)
        start = self._start(x.shape, axes)
        return lax.dynamic_update_slice(x, here + more.reshape(here.shape), start)

    def _start(self, shape: tuple[int, ...], axes: str) -> tuple:
        """The first index on each axis, 0 where the axis is broadcast or not named."""
        first = {"B": self.b, "K": self.k, "N": self.k * self.call.G, "T": self.t, "S": self.s}
        at = [first[axis] for axis in axes] + [np.int32(0)] * (len(shape) - len(axes))
        return tuple(np.int32(0) if n == 1 else i for n, i in zip(shape, at, strict=True))

    def _cut(self, x: AnyArray, axes: str) -> jax.Array:
        """The tile's part of x, whose first axes are these; an axis of 1 stays as it is."""
        sizes = self.sizes
        size = {"B": 1, "K": sizes.K, "N": sizes.K * self.call.G, "T": sizes.T, "S": sizes.S}
        wanted = [size[axis] for axis in axes] + list(x.shape[len(axes) :])
        shape = [1 if n == 1 else m for n, m in zip(x.shape, wanted, strict=True)]
        return lax.dynamic_slice(x, self._start(x.shape, axes), shape)

    def _grouped(self, x: jax.Array) -> jax.Array:
        """(1, N or 1, …) → (K or 1, G or 1, …), of the tile's heads; lower ranks are filled up."""
        x = x.reshape((1,) * (4 - x.ndim) + x.shape)
        heads = (1, 1) if x.shape[1] == 1 else (self.sizes.K, self.call.G)
        return x.reshape(*heads, *x.shape[2:])


def _count(n: int) -> jax.Array:
    return jnp.arange(n, dtype=jnp.int32)
