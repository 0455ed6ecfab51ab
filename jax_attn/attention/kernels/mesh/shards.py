"""Parts of a call on each device of a mesh: some rows of the batch, and some heads.

Attention of one row by one query head needs nothing from the others, so a call that is sharded
along these two axes takes no communication. A cache may also be sharded along its places; the
devices then merge their results. If the query heads are sharded over more devices than there are
key/value heads, each device has all key/value heads and reads those of its own query heads.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jax_attn.attention.call import Call
from jax_attn.attention.dropout import WeightPlace
from jax_attn.attention.kernels.forward_mode import Floats
from jax_attn.attention.kv_cache import KVCache
from jax_attn.attention.meshes import MeshAxes

WHOLE = "."
"""The letter of an axis that is not sharded."""
PLACES = "P"
"""The letter of a cache's places."""
AXES = {
    "query": "B.N.",
    "key": "B.K.",
    "value": "B.K.",
    "bias": "BN..",
    "bias_k": "K.",
    "bias_v": "K.",
    "sinks": "N",
    "position_bias.slopes": "N",
    "position_bias.rows": "N.",
    "mask.lo": "B",
    "mask.hi": "B",
    "mask.kv_lengths": "B",
    "mask.q_segments": "B.",
    "mask.kv_segments": "B.",
    "mask.allowed": "BN..",
    "dropout.keep": "BN..",
}
"""Arrays of a call → a letter for each axis; arrays that broadcast may have only the last axes."""
OUTPUT, SUMS, WEIGHTS = "B.N.", "BN.", "BN.."
"""Axes of attention's output, (B, T, N, Hv), of one number per query, (B, N, T), and of the
weights, (B, N, T, S)."""


def letters(call: Call) -> list[str]:
    """Return the letters of each array of a call, in the order of its leaves."""
    sizes = {"B": call.B, "N": call.N, "K": call.K}

    def of(path: Any, x: Any) -> str:
        named = AXES.get(jax.tree_util.keystr(path, simple=True, separator="."), "")
        named = named[max(len(named) - x.ndim, 0) :].rjust(x.ndim, WHOLE)
        return "".join(
            a if sizes.get(a) == n else WHOLE for a, n in zip(named, x.shape, strict=True)
        )

    return [of(path, x) for path, x in jax.tree_util.tree_leaves_with_path(call)]


def letters_of_cache(cache: KVCache) -> tuple[str, ...]:
    """Return the letters of each array of a cache, in the order of its leaves."""
    return (*("BK.P",) * len(cache.keys), *("BKP.",) * len(cache.values), "B")


@dataclass(frozen=True)
class Shards:
    """The mesh axes along which a call is sharded.

    axes: B, N, K, P, or the letter of an axis that a vmap adds → the axes of the mesh, or the names
    of the vmapped axes. N, K: query and key/value heads of the whole call. own: whether each device
    gets only the key/value heads that it reads, although several devices read the same ones.
    """

    axes: Mapping[str, MeshAxes]
    N: int
    K: int
    own: bool = False

    @classmethod
    def of(
        cls,
        N: int,
        K: int,
        mesh: Mapping[str, int],
        named: Sequence[str],
        cuts: Sequence[Sequence[MeshAxes]],
    ) -> "Shards":
        """For each axis, take the sharding of the first array that is sharded along it.

        N, K: query and key/value heads. mesh: sizes of its axes. named: the arrays' letters. cuts:
        for each array the mesh axes that shard its axes. Mesh axes of the query heads also shard
        the key/value heads, if they divide them. Mesh axes of a cache's places shard nothing else,
        because there are fewer queries than cached tokens.
        """
        axes: dict[str, MeshAxes] = {}
        pairs = [
            (letter, names)
            for array, cut in zip(named, cuts, strict=True)
            for letter, names in zip(array.replace("K", "N"), cut, strict=True)
        ]
        for letter, names in sorted(pairs, key=lambda pair: pair[0] != PLACES):
            taken = {name for each in axes.values() for name in each}
            if names and letter not in (WHOLE, *axes) and not taken & {*names}:
                axes[letter] = names
        heads = axes.get("N", ())
        if heads and K % math.prod(mesh[name] for name in heads) == 0:
            axes["K"] = heads
        return cls(axes, N, K)

    def spec(self, array: str) -> PartitionSpec:
        """Return the PartitionSpec of an array with these letters."""
        return PartitionSpec(*(self.axes.get(letter) for letter in array))

    def lacking(self, array: str) -> MeshAxes:
        """Return the mesh axes along which an array with these letters is replicated.

        The axes that a vmap adds do not count: each of its rows has its own gradient. Nor do a
        cache's places: the devices merge their results.
        """
        own = {name for letter in array for name in self.axes.get(letter, ())}
        counts = {letter for letter in self.axes if letter.isupper()} - {PLACES}
        axes = [self.axes[letter] for letter in self.axes if letter in counts]
        cut = dict.fromkeys(name for each in axes for name in each)
        return tuple(name for name in cut if name not in own)

    @property
    def share_heads(self) -> bool:
        """True if several devices read the same key/value heads."""
        return "N" in self.axes and "K" not in self.axes

    def here(self, call: Call) -> Call:
        """Return this device's call, given its parts of the arrays.

        It reads its own key/value heads, and its dropout equals the whole call's.
        """
        if self.share_heads and not self.own:
            call = call.with_floats(self.read(call.floats))
        if call.dropout is None or call.dropout.key is None:
            return call
        place = WeightPlace(self._first("B", call.B), self._first("N", call.N), jnp.int32(self.N))
        return replace(call, dropout=call.dropout.within(place))

    def read(self, floats: Floats) -> Floats:
        """Replace all key/value heads in a call's floats by those that this device reads."""
        query = floats["query"]
        assert query is not None
        count, axes = query.shape[2], {"key": 2, "value": 2, "bias_k": 0, "bias_v": 0}
        return {
            n: self.read_heads(count, x, axes[n]) if n in axes and x is not None else x
            for n, x in floats.items()
        }

    def read_heads(self, count: int, x: jax.Array, axis: int) -> jax.Array:
        """Return those of all key/value heads along an axis that this device reads.

        count: the number of its query heads.
        """
        return _read(self._first("N", count), count, self.N // self.K, x, axis)

    def _first(self, letter: str, count: int) -> jax.Array:
        """Return the index of the first of this device's `count` along an axis."""
        axes = self.axes.get(letter, ())
        return lax.axis_index(axes) * count if axes else jnp.int32(0)


def _read(first: jax.Array, count: int, G: int, x: jax.Array, axis: int) -> jax.Array:
    """Return the key/value heads along an axis that `count` query heads from `first` on read."""
    if G % count == 0:
        return lax.dynamic_slice_in_dim(x, first // G, 1, axis)
    return jnp.take(x, (first + jnp.arange(count, dtype=jnp.int32)) // G, axis, mode="clip")
