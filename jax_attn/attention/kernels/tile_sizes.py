"""Tile sizes of a call, from limits that were measured beforehand, never at run time.

`parity_tests/evidence/scripts/tiles.py` times them against halved and doubled ones, by dtype, head
dimension and length, and notes the machine's caches.
"""

from typing import NamedTuple

from jax_attn.attention.call import Call
from jax_attn.attention.kernels.tile import Tiles


class Most(NamedTuple):
    """Upper limits of a tile: rows (its query heads times its queries), queries and keys."""

    rows: int
    queries: int
    keys: int


# XLA:CPU sums a product's terms sequentially: with 512 keys in a tile the error is 1.30 times that
# of torch's kernel, with 256 it is 1.08 times. In tiles that a band's edge crosses, half of the
# scores are wasted, so fewer queries are better; but a product of fewer than 512 rows (a key/value
# head's query heads times the queries) runs on one thread.
ROWS, KEYS = 4096, 256
WITHOUT_BAND, WITH_BAND = Most(ROWS, 1024, KEYS), Most(ROWS, 512, KEYS)
WITH_BAND_GROUPED = Most(ROWS, 256, KEYS)


def tile_sizes(call: Call) -> Tiles:
    """Return the tile sizes of this call, forward and backward."""
    return sized(call, table_row(call))


def table_row(call: Call) -> Most:
    """Return the limits for this call's tiles."""
    if call.mask.lo is None and call.mask.hi is None:
        return WITHOUT_BAND
    return WITH_BAND if call.G == 1 else WITH_BAND_GROUPED


def sized(call: Call, most: Most) -> Tiles:
    """Return the largest tiles within these limits, of equal size along each axis."""
    T = _even(call.T, min(most.queries, max(1, most.rows // call.G)))
    heads = [K for K in range(1, call.K + 1) if call.K % K == 0 and most.rows >= K * call.G * T]
    return Tiles(max(heads, default=1), T, _even(call.S, most.keys))


def _even(n: int, most: int) -> int:
    """Return a size ≤ `most` that divides n into as few tiles as possible, of nearly equal size.

    Tiles of equal size overlap least. If there are several, the size is a multiple of eight.
    """
    count = -(-n // most)
    size = -(-n // count)
    return n if count == 1 else min(most, -(-size // 8) * 8)
