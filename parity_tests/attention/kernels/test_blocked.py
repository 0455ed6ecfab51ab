"""The blocked kernel is the dense one, in O(T) memory, without the tiles that cannot count."""

import functools
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.attention.kernel_comparison import (
    draws,
    example,
    in_tiles,
    rounding,
    value_and_gradients,
)
from helpers.jaxprs import shapes
from jax_attn.attention import Dropout, Mask
from jax_attn.attention.kernels import blocked
from jax_attn.attention.kernels.tile import Tile
from jax_attn.attention.kernels.tile_sizes import KEYS, ROWS

pytestmark = pytest.mark.filterwarnings("error")


# --- the same as dense, whatever is asked for -------------------------------------------------


@st.composite
def calls(draw):
    """(kernel in tiles, query, key, value, cotangent, options): any call, in float64."""
    B, T, S, K, G, H, Hv = (draw(st.integers(1, n)) for n in (3, 9, 9, 3, 3, 5, 5))
    tiles = (
        draw(st.sampled_from([k for k in range(1, K + 1) if K % k == 0])),
        draw(st.integers(1, T)),
        draw(st.integers(1, S)),
    )
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    N = K * G
    each = (B, T, N, H), (B, S, K, H), (B, S, K, Hv), (B, T, N, Hv)
    arrays = tuple(rng.standard_normal(shape) for shape in each)
    far = rng.choice(np.array([-(2**31), -1, 0, 2, 2**31 - 1], np.int32), size=B)
    offset = draw(st.sampled_from([0, S - T, rng.integers(-S, S, size=B), far]))
    side = st.one_of(st.none(), st.integers(0, 9))
    whole = st.tuples(*(st.sampled_from([1, n]) for n in (B, N, T, S)))
    part = st.one_of(whole, whole.map(lambda shape: shape[1:]), whole.map(lambda shape: shape[2:]))
    masks = [Mask()]
    if draw(st.booleans()):
        masks.append(Mask.window(draw(side), draw(side), offset))
    if draw(st.booleans()):
        masks.append(Mask.lengths(rng.integers(0, S + 1, size=B)))
    if draw(st.booleans()):
        q_ids, kv_ids = (
            rng.integers(0, 3, size=draw(st.sampled_from([(B, n), (B, 1), (1, n)]))) for n in (T, S)
        )
        packed = draw(st.booleans())
        masks.append(Mask.segments(*((np.sort(ids) if packed else ids) for ids in (q_ids, kv_ids))))
    if draw(st.booleans()):
        masks.append(Mask.array(rng.random(draw(whole)) < 0.7))
    options = {
        "mask": functools.reduce(lambda a, b: a & b, masks),
        "is_causal": draw(st.booleans()),
        "softcap": draw(st.sampled_from([None, 1.5])),
        "scale": draw(st.sampled_from([None, -0.8])),
    }
    if draw(st.booleans()):
        bias = rng.standard_normal(draw(part))
        options["bias"] = np.where(
            rng.random(bias.shape) < draw(st.sampled_from([0, 0.3])), -np.inf, bias
        )
    if draw(st.booleans()):
        drawn = draw(st.booleans())
        how = {"key": jax.random.key(3)} if drawn else {"keep": rng.random(draw(part)) < 0.7}
        options["dropout"] = Dropout(0.3, **how)
    return in_tiles(*tiles), *arrays, options


@settings(suppress_health_check=list(HealthCheck))
@given(calls())
def test_blocked_is_dense_to_rounding_forward_and_backward(call):
    kernel, *arrays, options = call
    with jax.enable_x64(True):
        wanted = value_and_gradients("dense", *arrays, **options)
        tiled = value_and_gradients(kernel, *arrays, **options)
        for got, want in zip(tiled, wanted, strict=True):
            assert got.shape == want.shape
            assert got.dtype == jnp.float64
            assert np.abs(got - want).max() <= rounding(arrays, want)


SEGMENT = np.array([[0], [1], [2]])  # one a batch row: broadcasts along it
EXTREME = np.array([2**31 - 1, -(2**31), 5], np.int32)
# In tiles of the sizes that are chosen: several of them on an axis, the last one overlapping.
CHOSEN = {
    "tiles of keys": ((3, 64, 257), {}),
    "tiles of queries": ((3, 1030, 40), {}),
    "causal": ((3, 700, 700), {"is_causal": True}),
    "one segment a row": ((3, 64, 257), {"mask": Mask.segments(SEGMENT, SEGMENT)}),
    "offsets as far as int32 goes": ((3, 40, 300), {"mask": Mask.causal(EXTREME)}),
    "lengths likewise": ((3, 40, 300), {"mask": Mask.lengths(EXTREME)}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHOSEN)
def test_and_in_the_tiles_that_are_chosen(name):
    (B, T, S), options = CHOSEN[name]
    arrays = draws((B, T, 2, 3), (B, S, 1, 3), (B, S, 1, 3), (B, T, 2, 3), dtype=np.float64)
    with jax.enable_x64(True):
        wanted = value_and_gradients("dense", *arrays, **options)
        made = value_and_gradients("blocked", *arrays, **options)
        for got, want in zip(made, wanted, strict=True):
            assert np.abs(got - want).max() <= rounding(arrays, want)


@pytest.mark.slow
@pytest.mark.parametrize("tile", [(2, 512), (7, 64), (64, 7), (31, 251), (512, 256), (1000, 256)])
def test_weights_are_the_same_bits_backward_as_forward(tile):
    """A query that sees one key gives it a weight of 1, however large the score."""
    B, T, H = 1, 1031, 64
    q, k, v, d_out = draws(*4 * [(B, T, 1, H)], dtype=np.float32)
    kernel, one_key = in_tiles(1, *tile), Mask.window(0, 0)
    *_, d_value = value_and_gradients(kernel, 9 * q, k, v, d_out, mask=one_key)
    np.testing.assert_array_equal(d_value, d_out)


@pytest.mark.slow
def test_an_empty_row_has_no_gradient_whatever_its_cotangent():
    """As of a loss that takes the logarithm, or the norm, of a row of zeros."""
    q, k, v, d_out = draws(*4 * [(2, 7, 1, 3)], dtype=np.float32)
    d_out[0, 0], d_out[1, 0] = np.inf, np.nan
    kernel, below = in_tiles(1, 3, 4), Mask.causal(-1)  # the first query sees nothing
    gradients = value_and_gradients(kernel, q, k, v, d_out, mask=below)[1:]
    d_out[:, 0] = 0
    wanted = value_and_gradients(kernel, q, k, v, d_out, mask=below)[1:]
    jax.tree.map(np.testing.assert_array_equal, gradients, wanted)


@pytest.mark.slow
def test_a_hidden_key_has_no_gradient_whatever_its_value():
    """As of padding, which may hold numbers whose products overflow."""
    q, k, v, d_out = draws(*4 * [(1, 7, 1, 3)], dtype=np.float32)
    padding, lengths = np.arange(7) >= 5, Mask.lengths([5])
    v[:, padding] = 1e38
    kernel = in_tiles(1, 3, 4)
    _, d_query, d_key, d_value = value_and_gradients(kernel, q, k, v, 100 * d_out, mask=lengths)
    for gradient in (d_query, d_key, d_value):
        assert np.isfinite(gradient).all()
    assert not d_key[:, padding].any()


@pytest.fixture
def traced_anew(monkeypatch):
    """What was traced without a planted bug does not serve, and what is traced with one is lost."""
    for name in ("_outputs", "_gradients"):
        monkeypatch.setattr(blocked, name, getattr(blocked, name).__wrapped__)


@pytest.mark.usefixtures("traced_anew")
class TestTheComparisonSees:
    """Each would be a bug of this kernel; the comparison above must not pass it."""

    def differs(self, **options):
        arrays, kernel = example(), in_tiles(1, 3, 4)
        with jax.enable_x64(True):
            wanted = value_and_gradients("dense", *arrays, **options)
            made = zip(value_and_gradients(kernel, *arrays, **options), wanted, strict=True)
            return [bool(np.abs(a - b).max() > rounding(arrays, b)) for a, b in made]

    @pytest.mark.slow
    def test_nothing_where_nothing_is_wrong(self):
        assert self.differs(is_causal=True) == [False] * 4

    @pytest.mark.slow
    def test_a_tile_of_keys_left_out(self, monkeypatch):
        columns = Tile.columns

        def fewer(row):
            found = columns(row)
            return found._replace(seen=found.seen - 1)

        monkeypatch.setattr(Tile, "columns", fewer)
        assert self.differs() == [True] * 4

    @pytest.mark.slow
    def test_a_partial_tile_taken_for_a_whole_one(self, monkeypatch):
        columns = Tile.columns

        def whole(row):
            found = columns(row)
            return found._replace(whole=found.seen)

        monkeypatch.setattr(Tile, "columns", whole)
        assert self.differs(is_causal=True) == [True] * 4

    @pytest.mark.slow
    def test_gradients_of_keys_added_at_another_place(self, monkeypatch):
        add = Tile.add_keys
        monkeypatch.setattr(
            Tile, "add_keys", lambda tile, *of: add(replace(tile, s=0 * tile.s), *of)
        )
        assert self.differs() == [False, False, True, True]

    @pytest.mark.slow
    def test_keys_at_the_edge_counted_twice(self, monkeypatch):
        monkeypatch.setattr(Tile, "allowed", lambda tile: None)
        assert self.differs() == [True] * 4

    @pytest.mark.slow
    def test_queries_at_the_edge_counted_twice(self, monkeypatch):
        monkeypatch.setattr(Tile, "own", lambda tile: jnp.array(True))
        assert self.differs() == [False, True, True, True]

    @pytest.mark.slow
    def test_a_mask_that_is_not_moved_to_its_tile(self, monkeypatch):
        monkeypatch.setattr(Tile, "mask", lambda tile: tile.call.mask)
        assert self.differs(is_causal=True) == [True] * 4

    @pytest.mark.slow
    def test_other_dropout_backward_than_forward(self, monkeypatch):
        places, asked = Tile.places, []

        def wandering(tile):
            asked.append(tile)
            rows, columns = places(tile)
            return rows + np.uint32(len(asked) > 1), columns

        monkeypatch.setattr(Tile, "places", wandering)
        assert any(self.differs(dropout=Dropout(0.4, key=jax.random.key(0))))


# --- memory ------------------------------------------------------------------------------------


def abstract(T, S, B=1, N=4, K=2, H=8):
    return [
        jax.ShapeDtypeStruct(shape, jnp.float32)
        for shape in ((B, T, N, H), (B, S, K, H), (B, S, K, H), (B, T, N, H))
    ]


MASKS = {
    "none": Mask(),
    "causal and a window": Mask.causal() & Mask.window(700, None),
    "lengths": Mask.lengths(np.array([1500])),
    "segments": Mask.segments(np.zeros((1, 2053), int), np.zeros((1, 3001), int)),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("implementation", ["blocked", "dense"])
def test_no_array_of_queries_by_keys(mask, implementation):
    T, S = 2053, 3001

    def run(q, k, v, cotangent):
        return value_and_gradients(implementation, q, k, v, cotangent, mask=MASKS[mask])

    largest = max(map(math.prod, shapes(jax.make_jaxpr(run)(*abstract(T, S)).jaxpr)))
    # The tile's scores, or the largest of the arrays themselves.
    assert (largest <= max(ROWS * KEYS, S * 2 * 8)) == (implementation == "blocked")


def test_a_bias_is_sliced_and_its_gradient_has_its_shape():
    T, S = 2053, 3001

    def run(q, k, v, cotangent, bias):
        return value_and_gradients("blocked", q, k, v, cotangent, bias=bias)

    bias = jax.ShapeDtypeStruct((1, 4, 1, S), jnp.float32)
    jaxpr = jax.make_jaxpr(run)(*abstract(T, S), bias)
    assert max(map(math.prod, shapes(jaxpr.jaxpr))) <= ROWS * KEYS
    assert jaxpr.out_avals[-1].shape == bias.shape


@pytest.mark.slow
def test_temporaries_at_32768_by_8_heads_stay_below_128_mib():
    def run(*arrays):
        return value_and_gradients("blocked", *arrays, is_causal=True)

    compiled = jax.jit(run).lower(*abstract(32768, 32768, N=8, K=8, H=64)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes <= 128 * 2**20
