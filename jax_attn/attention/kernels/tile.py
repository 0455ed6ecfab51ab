"""A tile of the scores: some heads of one batch row, some queries, some keys.

Tiles are sliced from the arrays in their own layout, (B, T, N, H), without padding: a tile that
would cross an edge is moved back inside and overlaps its neighbour; the queries and keys before its
`own` first ones belong to the neighbour.
"""

import functools
import math
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_attn.attention.annotations import AnyArray
from jax_attn.attention.call import Call
from jax_attn.attention.dropout import WeightPlace
from jax_attn.attention.integers import FAR
from jax_attn.attention.mask import Band, Mask


@dataclass(frozen=True)
class Tiles:
    """Sizes of a tile: K key/value heads with their K·G query heads, T queries and S keys.

    `within` makes K divide the call's, and T and S no larger than the call's. The queries of all
    heads that share a key/value head are rows of one matrix: R = G·T.
    """

    K: int
    T: int
    S: int

    def within(self, call: Call) -> "Tiles":
        """Return tiles no larger than the call, with heads that divide the call's."""
        return Tiles(math.gcd(self.K, call.K), min(self.T, call.T), min(self.S, call.S))

    def groups(self, call: Call) -> int:
        """Return the number of groups of heads, in all batch rows."""
        return call.B * (call.K // self.K)

    def rows(self, call: Call) -> int:
        """Return the number of rows of tiles in a group of heads."""
        return -(-call.T // self.T)


class Columns(NamedTuple):
    """Columns of tiles: `order` begins with the `whole` columns in which every pair is visible.

    The other columns in which a pair may be visible follow, up to `seen`.
    """

    order: jax.Array | np.ndarray
    whole: jax.Array | np.integer
    seen: jax.Array | np.integer


@dataclass(frozen=True)
class Tile:
    """Position of a tile of `call`: batch row b, first key/value head k, query t and key s.

    own_t, own_s: the first query and key that no earlier tile has.
    """

    call: Call
    sizes: Tiles
    b: jax.Array
    k: jax.Array
    t: jax.Array
    own_t: jax.Array
    s: jax.Array
    own_s: jax.Array
    # Whether every query is known to see every key.
    is_whole: bool = False
    # The fields that `mask` moves to a tile.
    MASK: ClassVar = ("lo", "hi", "kv_lengths", "q_segments", "kv_segments", "allowed")

    @classmethod
    def row(cls, call: Call, sizes: Tiles, n: jax.Array) -> "Tile":
        """Return the n-th row of tiles over batch, heads and queries."""
        heads, queries = call.K // sizes.K, sizes.rows(call)
        n = jnp.asarray(n, jnp.int32)  # int64 under x64, a plain int under jax_disable_jit
        own_t = n % queries * sizes.T
        t = jnp.minimum(own_t, call.T - sizes.T)
        b, k, start = n // (heads * queries), n // queries % heads * sizes.K, jnp.int32(0)
        return cls(call, sizes, b=b, k=k, t=t, own_t=own_t, s=start, own_s=start)

    def column(self, j: jax.Array, is_whole: bool = False) -> "Tile":
        """Return the j-th tile over the keys, in this row."""
        own_s = jnp.asarray(j, jnp.int32) * self.sizes.S
        s = jnp.minimum(own_s, self.call.S - self.sizes.S)
        return replace(self, s=s, own_s=own_s, is_whole=is_whole)

    def queries(self, x_BTNH: jax.Array) -> jax.Array:
        """Slice the tile's (K, R, H) from (B, T, N, H)."""
        x_TKGH = self._cut(x_BTNH, "BTN")[0].reshape(self.sizes.T, self.sizes.K, self.call.G, -1)
        return x_TKGH.transpose(1, 2, 0, 3).reshape(self.sizes.K, -1, x_TKGH.shape[-1])

    def keys(self, x_BSKH: jax.Array) -> jax.Array:
        """Slice the tile's (K, S, H) from (B, S, K, H)."""
        return self._cut(x_BSKH, "BSK")[0].swapaxes(0, 1)

    def rows(self, x_BNT: jax.Array) -> jax.Array:
        """Slice the tile's (K, R) from (B, N, T)."""
        return self._cut(x_BNT, "BNT").reshape(self.sizes.K, -1)

    def scores(self, x: AnyArray) -> jax.Array:
        """Slice the tile's part of an array that broadcasts to (B, N, T, S); see `in_rows`."""
        return self._cut(x, "BNTS"[4 - x.ndim :])

    def in_rows(self, x: jax.Array) -> jax.Array:
        """Reshape what broadcasts to the tile's (1, N, T, S) so that it broadcasts to (K, R, S)."""
        *_, N, T, S = (1,) * (4 - x.ndim) + x.shape
        if N == T == 1:
            return x.reshape(1, 1, S)
        heads = (1, 1) if N == 1 else (self.sizes.K, self.call.G)
        whole = (heads[0], self.call.G, self.sizes.T, S)
        return jnp.broadcast_to(x.reshape(*heads, T, S), whole).reshape(heads[0], -1, S)

    def places(self) -> tuple[jax.Array, jax.Array]:
        """Return uint32 rows (K, R, 1) and columns (S,) of the scores, as in `Dropout.drawn`."""
        call, sizes = self.call, self.sizes
        place = None if call.dropout is None else call.dropout.place
        place = place or WeightPlace(*(np.array(n, np.int32) for n in (0, 0, call.N)))
        n_N1 = self.k * call.G + _count(sizes.K * call.G)[:, None]
        rows_NT = place.rows(self.b, n_N1, self.t + _count(sizes.T), call.T)
        columns = (self.s + _count(sizes.S)).astype(jnp.uint32)
        return rows_NT.reshape(sizes.K, -1, 1), columns

    def mask(self) -> Mask:
        """Return the mask of this tile, its queries and keys numbered from 0; of one batch row."""
        whole = self.call.mask

        def moved(x: Band | None, by: jax.Array) -> jax.Array | None:
            if x is None or isinstance(x, int):
                return x if x is None else x - by
            # Clip, so that subtracting the tile's place cannot wrap around; plain numbers are
            # clipped already.
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
        """Return which queries no earlier tile has, (R,)."""
        return jnp.tile(_count(self.sizes.T) >= self.own_t - self.t, self.call.G)

    def allowed(self) -> jax.Array | None:
        """Return a mask that broadcasts to (K, R, S), True = attend; None if all pairs may.

        Keys that belong to another tile are hidden.
        """
        call, sizes = self.call, self.sizes
        conditions = []
        if self.is_whole:
            return None
        if not call.mask.is_open:
            conditions.append(self.in_rows(self.mask().materialize(sizes.T, sizes.S)))
        if call.S % sizes.S:
            conditions.append((_count(sizes.S) >= self.own_s - self.s)[None, None])
        return functools.reduce(jnp.logical_and, conditions) if conditions else None

    def columns(self) -> Columns:
        """Return the columns of tiles in this row in which a key may be visible.

        They are found by band, lengths and segments; an array of booleans is not searched. Sorted
        segments, as in packed sequences, skip every tile of other sequences.
        """
        T, S, size = self.sizes.T, self.call.S, self.sizes.S
        count, mask = -(-S // size), self.mask()
        if self.call.mask.is_open:
            return Columns(np.arange(count), np.int32(S // size), np.int32(count))
        first = _count(count) * size
        last = first + (size - 1)
        # The last tile is whole only if it does not overlap its neighbour.
        some, every = [], [last < S]
        if mask.lo is not None:
            some.append(last >= mask.lo)
            every.append(first >= mask.lo + (T - 1))
        if mask.hi is not None:
            some.append(first <= mask.hi + (T - 1))
            every.append(last <= mask.hi)
        if mask.kv_lengths is not None:
            some.append(first < mask.kv_lengths)
            every.append(last < mask.kv_lengths)
        if mask.q_segments is not None:
            keys = self.call.mask.kv_segments
            ids_S = jnp.broadcast_to(jnp.asarray(keys), (self.call.B, S))[self.b]
            ids = jnp.pad(ids_S, (0, count * size - S), mode="edge").reshape(count, size)
            lowest, highest = ids.min(axis=1), ids.max(axis=1)
            least, most = mask.q_segments.min(), mask.q_segments.max()
            some += [lowest <= most, highest >= least]
            every += [lowest == most, highest == least]
        seen = functools.reduce(jnp.logical_and, some, jnp.ones(count, bool))
        seen_count = seen.sum(dtype=jnp.int32)
        # A second loop does not pay for one column, nor if there is an array, which is not
        # searched.
        if count == 1 or mask.allowed is not None:
            return Columns(jnp.argsort(~seen), np.int32(0), seen_count)
        whole = functools.reduce(jnp.logical_and, every, seen)
        order = jnp.argsort(jnp.where(whole, 0, jnp.where(seen, 1, 2)))
        return Columns(order, whole.sum(dtype=jnp.int32), seen_count)

    def put_queries(self, x_BTNH: jax.Array, new_KRH: jax.Array) -> jax.Array:
        H = new_KRH.shape[-1]
        new_KGTH = new_KRH.reshape(self.sizes.K, self.call.G, self.sizes.T, H)
        new = new_KGTH.transpose(2, 0, 1, 3).reshape(1, self.sizes.T, -1, H)
        return lax.dynamic_update_slice(
            x_BTNH, new.astype(x_BTNH.dtype), self._start(x_BTNH.shape, "BTN")
        )

    def put_keys(self, x_BSKH: jax.Array, new_KHS: jax.Array) -> jax.Array:
        """Write all the keys of the tile's heads."""
        zero = jnp.zeros_like(self.s)
        start = replace(self, s=zero)._start(x_BSKH.shape, "BSK")
        return lax.dynamic_update_slice(x_BSKH, new_KHS.transpose(2, 0, 1)[None], start)

    def add_keys(self, x_KHS: jax.Array, more_KHS: jax.Array) -> jax.Array:
        """Add to the tile's keys in an array of all keys of its heads."""
        start = (np.int32(0), np.int32(0), self.s)
        here = lax.dynamic_slice(x_KHS, start, more_KHS.shape)
        return lax.dynamic_update_slice(x_KHS, here + more_KHS, start)

    def put_rows(self, x_BNT: jax.Array, new_KR: jax.Array) -> jax.Array:
        new = new_KR.reshape(1, -1, self.sizes.T)
        return lax.dynamic_update_slice(x_BNT, new, self._start(x_BNT.shape, "BNT"))

    def add_scores(self, x: jax.Array, more: jax.Array) -> jax.Array:
        """Add `more` to the part of x that `scores` slices."""
        start = self._start(x.shape, "BNTS"[4 - x.ndim :])
        return lax.dynamic_update_slice(x, self.scores(x) + more, start)

    def _start(self, shape: tuple[int, ...], axes: str) -> tuple:
        """Return the first index on each axis, 0 if the axis is broadcast or not named."""
        first = {"B": self.b, "K": self.k, "N": self.k * self.call.G, "T": self.t, "S": self.s}
        at = [first[axis] for axis in axes] + [np.int32(0)] * (len(shape) - len(axes))
        return tuple(np.int32(0) if n == 1 else i for n, i in zip(shape, at, strict=True))

    def _cut(self, x: AnyArray, axes: str) -> jax.Array:
        """Slice the tile's part of x, whose first axes are named; axes of size 1 stay."""
        sizes = self.sizes
        size = {"B": 1, "K": sizes.K, "N": sizes.K * self.call.G, "T": sizes.T, "S": sizes.S}
        wanted = [size[axis] for axis in axes] + list(x.shape[len(axes) :])
        shape = [1 if n == 1 else m for n, m in zip(x.shape, wanted, strict=True)]
        return lax.dynamic_slice(x, self._start(x.shape, axes), shape)


def _count(n: int) -> jax.Array:
    return jnp.arange(n, dtype=jnp.int32)
