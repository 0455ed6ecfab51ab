"""The tiles of a call: which are visited, which need no mask, and how large they are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_attn.attention import Mask
from jax_attn.attention.call import checked_call
from jax_attn.attention.kernels.tile import Tile, Tiles
from jax_attn.attention.kernels.tile_sizes import tile_sizes

pytestmark = pytest.mark.filterwarnings("error")


def abstract(B, T, S, N, K, mask):
    """A call of these sizes, without its arrays."""
    shapes = (B, T, N, 8), (B, S, K, 8), (B, S, K, 8)
    arrays = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    return checked_call("tiles", *arrays, mask)


# --- what is skipped ---------------------------------------------------------------------------


def columns(mask, T, S, tile, B=1):
    """For each row of tiles, the columns in which all is visible, and in which something may be."""
    call = abstract(B, T, S, 1, 1, mask)
    rows = [Tile.row(call, tile, jnp.int32(n)).columns() for n in range(B * tile.rows(call))]
    order = [np.asarray(row.order).tolist() for row in rows]
    ends = [(int(row.whole), int(row.seen)) for row in rows]
    return [
        (set(j[:whole]), set(j[whole:seen])) for j, (whole, seen) in zip(order, ends, strict=True)
    ]


PACKED = np.repeat([0, 1, 2], [5, 4, 3])[None]
UNSORTED = np.repeat([0, 1, 0], 4)[None]
ALLOWED = np.ones((4, 12), bool)
# mask, T, S, (queries, keys) in a tile → the columns of each row of tiles: whole, and others.
COLUMNS = {
    "all": (Mask(), 12, 12, (4, 4), [({0, 1, 2}, set())] * 3),
    "all, the last one overlapping": (Mask(), 4, 11, (4, 4), [({0, 1}, {2})]),
    "causal": (Mask.causal(), 12, 12, (4, 4), [(set(), {0}), ({0}, {1}), ({0, 1}, {2})]),
    "causal, bottom right": (Mask.causal(4), 8, 12, (4, 4), [({0}, {1}), ({0, 1}, {2})]),
    "causal, off the tiles": (Mask.causal(3), 8, 12, (4, 4), [({0}, {1}), ({0, 1}, {2})]),
    "causal, one key short": (Mask.causal(2), 8, 12, (4, 4), [(set(), {0, 1}), ({0}, {1, 2})]),
    "causal, traced": (Mask.causal(np.array([4])), 8, 12, (4, 4), [({0}, {1}), ({0, 1}, {2})]),
    "window": (
        Mask.window(3, 0),
        12,
        12,
        (4, 4),
        [(set(), {0}), (set(), {0, 1}), (set(), {1, 2})],
    ),
    "wide window": (
        Mask.window(7, 0),
        12,
        12,
        (4, 4),
        [(set(), {0}), ({0}, {1}), ({1}, {0, 2})],
    ),
    "lengths": (Mask.lengths(np.array([5])), 8, 12, (4, 4), [({0}, {1})] * 2),
    "lengths to a tile's edge": (Mask.lengths(np.array([8])), 4, 12, (4, 4), [({0, 1}, set())]),
    "no keys at all": (Mask.lengths(np.array([0])), 4, 12, (4, 4), [(set(), set())]),
    "packed sequences": (
        Mask.segments(PACKED, PACKED),
        12,
        12,
        (4, 4),
        [({0}, {1}), (set(), {0, 1, 2}), (set(), {1, 2})],
    ),
    "segments that return": (
        Mask.segments(UNSORTED, UNSORTED),
        12,
        12,
        (4, 4),
        [({0, 2}, set()), ({1}, set()), ({0, 2}, set())],
    ),
    "an array, which is not searched": (Mask.array(ALLOWED), 4, 12, (4, 4), [(set(), {0, 1, 2})]),
    "ragged edges": (Mask.causal(), 7, 7, (3, 3), [(set(), {0}), ({0}, {1}), ({0}, {1, 2})]),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_which_tiles_are_visited_and_which_need_no_mask(name):
    mask, T, S, (queries, keys), wanted = COLUMNS[name]
    assert columns(mask, T, S, Tiles(1, queries, keys)) == wanted


def test_lengths_skip_for_each_batch_row_by_itself():
    mask = Mask.lengths(np.array([3, 12]))
    wanted = [(set(), {0}), ({0, 1, 2}, set())]
    assert columns(mask, 4, 12, Tiles(1, 4, 4), B=2) == wanted


# --- the sizes of tiles ------------------------------------------------------------------------

# (T, S, N, K), band → (heads, queries, keys) in a tile. Tiles on an axis are alike, in eights.
TILES = {
    "one query and one key too many": ((1025, 257, 8, 8), Mask(), (4, 520, 136)),
    "long": ((4096, 4096, 8, 8), Mask(), (4, 1024, 256)),
    "long, causal": ((4096, 4096, 8, 8), Mask.causal(), (8, 512, 256)),
    "grouped": ((4096, 4096, 32, 8), Mask(), (1, 1024, 256)),
    "grouped, causal": ((4096, 4096, 32, 8), Mask.causal(), (4, 256, 256)),
    "multi-query": ((4096, 4096, 16, 1), Mask(), (1, 256, 256)),
    "heads that 4 does not divide": ((4096, 4096, 7, 7), Mask(), (1, 1024, 256)),
    "few queries": ((64, 8192, 8, 8), Mask(), (8, 64, 256)),
    "short": ((5, 7, 6, 3), Mask(), (3, 5, 7)),
    "more heads in a group than a tile has rows": ((9, 512, 8192, 1), Mask(), (1, 1, 256)),
}


@pytest.mark.parametrize("name", TILES)
def test_how_large_a_tile_is(name):
    (T, S, N, K), mask, wanted = TILES[name]
    assert tile_sizes(abstract(1, T, S, N, K, mask)) == Tiles(*wanted)
