"""The blocked kernel is the dense one, in O(T) memory, without the tiles that cannot count."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jax_attn.attention import Dropout, Mask, blocked, dot_product_attention
from jax_attn.attention.call import checked_call
from jax_attn.attention.tile import Sizes, Tile

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture(autouse=True)
def strict():
    with jax.numpy_dtype_promotion("strict"):
        yield


# --- the same as dense, whatever is asked for -------------------------------------------------


@st.composite
def calls(draw):
    """(sizes of tiles, query, key, value, cotangent, options): any call, in float64."""
    B, T, S, K, G, H, Hv = (draw(st.integers(1, n)) for n in (3, 9, 9, 3, 3, 5, 5))
    tile = Sizes(
        K=draw(st.sampled_from([k for k in range(1, K + 1) if K % k == 0])),
        T=draw(st.integers(1, T)),
        S=draw(st.integers(1, S)),
    )
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    N = K * G
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, Hv), (B, T, N, Hv)
    arrays = tuple(rng.standard_normal(shape) for shape in shapes)
    offset = draw(st.sampled_from([0, S - T, rng.integers(-S, S, size=B)]))
    side = st.one_of(st.none(), st.integers(0, 9))
    part = st.tuples(*(st.sampled_from([1, n]) for n in (B, N, T, S)))
    masks = [Mask()]
    if draw(st.booleans()):
        masks.append(Mask.window(draw(side), draw(side), offset))
    if draw(st.booleans()):
        masks.append(Mask.lengths(rng.integers(0, S + 1, size=B)))
    if draw(st.booleans()):
        q_ids, kv_ids = rng.integers(0, 3, size=(B, T)), rng.integers(0, 3, size=(B, S))
        packed = draw(st.booleans())
        masks.append(Mask.segments(*((np.sort(ids) if packed else ids) for ids in (q_ids, kv_ids))))
    if draw(st.booleans()):
        masks.append(Mask.array(rng.random(draw(part)) < 0.7))
    options = {
        "mask": functools.reduce(lambda a, b: a & b, masks),
        "is_causal": draw(st.booleans()),
        "softcap": draw(st.sampled_from([None, 1.5])),
        "scale": draw(st.sampled_from([None, -0.8])),
    }
    if draw(st.booleans()):
        options["bias"] = rng.standard_normal(draw(part))
    if draw(st.booleans()):
        drawn = draw(st.booleans())
        how = {"key": jax.random.key(3)} if drawn else {"keep": rng.random(draw(part)) < 0.7}
        options["dropout"] = Dropout(0.3, **how)
    return tile, *arrays, options


def value_and_gradients(implementation, q, k, v, cotangent, bias=None, **options):
    def attend(*arrays):
        q, k, v, bias = arrays
        return dot_product_attention(q, k, v, bias=bias, implementation=implementation, **options)

    @jax.jit
    def run(cotangent, *arrays):
        out, pull = jax.vjp(attend, *arrays)
        return out, *(g for g in pull(cotangent) if g is not None)

    return run(cotangent, q, k, v, bias)


def in_tiles(tile, *arguments, **options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocked, "tile_sizes", lambda call: tile)
        return value_and_gradients("blocked", *arguments, **options)


def rounding(arrays, wanted) -> float:
    """What two orders of the same sums may differ by, relative to the largest number.

    No sum has more terms than the axes have elements; scores pass through an exponential, which
    makes an error of theirs, at most √H·max|q|·max|k| units, a relative one.
    """
    q, k, v, _ = arrays
    steepness = 1 + math.sqrt(q.shape[-1]) * np.abs(q).max() * np.abs(k).max()
    terms = sum(q.shape) + k.shape[1] + v.shape[-1]
    return terms * steepness * 2.0**-53 * max(1.0, float(np.abs(wanted).max()))


@settings(suppress_health_check=list(HealthCheck))
@given(calls())
def test_blocked_is_dense_to_rounding_forward_and_backward(call):
    tile, *arrays, options = call
    with jax.enable_x64(True):
        wanted = value_and_gradients("dense", *arrays, **options)
        for got, want in zip(in_tiles(tile, *arrays, **options), wanted, strict=True):
            assert got.shape == want.shape
            assert got.dtype == jnp.float64
            assert np.abs(got - want).max() <= rounding(arrays, want)


def draws(*shapes, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def example(T=7, S=11, dtype=np.float64):
    return draws((2, T, 6, 5), (2, S, 3, 5), (2, S, 3, 5), (2, T, 6, 5), dtype=dtype)


class TestTheComparisonSees:
    """Each would be a bug of this kernel; the comparison above must not pass it."""

    def differs(self, **options):
        arrays, tile = example(), Sizes(1, 3, 4)
        with jax.enable_x64(True):
            wanted = value_and_gradients("dense", *arrays, **options)
            made = zip(in_tiles(tile, *arrays, **options), wanted, strict=True)
            return [bool(np.abs(a - b).max() > rounding(arrays, b)) for a, b in made]

    def test_nothing_where_nothing_is_wrong(self):
        assert self.differs(is_causal=True) == [False] * 4

    def test_a_tile_of_keys_left_out(self, monkeypatch):
        reach = Tile.reach
        monkeypatch.setattr(Tile, "reach", lambda row: (reach(row)[0], reach(row)[1] - 1))
        assert self.differs() == [True] * 4

    def test_keys_at_the_edge_counted_twice(self, monkeypatch):
        monkeypatch.setattr(Tile, "allowed", lambda tile: None)
        assert self.differs() == [True] * 4

    def test_queries_at_the_edge_counted_twice(self, monkeypatch):
        monkeypatch.setattr(Tile, "own", lambda tile: jnp.ones(tile.sizes.T, bool))
        assert self.differs() == [False, True, True, True]

    def test_a_mask_that_is_not_moved_to_its_tile(self, monkeypatch):
        monkeypatch.setattr(Tile, "mask", lambda tile: tile.call.mask)
        assert self.differs(is_causal=True) == [True] * 4

    def test_other_dropout_backward_than_forward(self, monkeypatch):
        places, asked = Tile.places, []

        def wandering(tile):
            asked.append(tile)
            rows, columns = places(tile)
            return rows + np.uint32(len(asked) > 1), columns

        monkeypatch.setattr(Tile, "places", wandering)
        assert any(self.differs(dropout=Dropout(0.4, key=jax.random.key(0))))


# --- memory ------------------------------------------------------------------------------------


def shapes_in(jaxpr):
    """The shape of every array in a jaxpr, those inside loops and calls too."""
    for equation in jaxpr.eqns:
        yield from (variable.aval.shape for variable in equation.outvars)
        for inner in jax.tree.leaves(equation.params, is_leaf=is_jaxpr):
            if is_jaxpr(inner):
                yield from shapes_in(getattr(inner, "jaxpr", inner))


def is_jaxpr(x):
    return hasattr(x, "eqns") or hasattr(x, "jaxpr")


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

    largest = max(map(math.prod, shapes_in(jax.make_jaxpr(run)(*abstract(T, S)).jaxpr)))
    # The tile's scores, or the largest of the arrays themselves.
    assert (largest <= max(blocked.ROWS * blocked.KEYS, S * 2 * 8)) == (implementation == "blocked")


def test_a_bias_is_sliced_and_its_gradient_has_its_shape():
    T, S = 2053, 3001

    def run(q, k, v, cotangent, bias):
        return value_and_gradients("blocked", q, k, v, cotangent, bias=bias)

    bias = jax.ShapeDtypeStruct((1, 4, 1, S), jnp.float32)
    jaxpr = jax.make_jaxpr(run)(*abstract(T, S), bias)
    assert max(map(math.prod, shapes_in(jaxpr.jaxpr))) <= blocked.ROWS * blocked.KEYS
    assert jaxpr.out_avals[-1].shape == bias.shape


def test_temporaries_at_32768_by_8_heads_stay_below_128_mib():
    def run(*arrays):
        return value_and_gradients("blocked", *arrays, is_causal=True)

    compiled = jax.jit(run).lower(*abstract(32768, 32768, N=8, K=8, H=64)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes <= 128 * 2**20


# --- what is skipped ---------------------------------------------------------------------------


def reaches(mask, T, S, tile, B=1):
    """For each row of tiles, the columns of tiles that are computed."""
    q, k, v, _ = abstract(T, S, B=B, N=1, K=1)
    call, problems = checked_call(
        q, k, v, mask, is_causal=False, bias=None, scale=None, softcap=None, dropout=None,
        precision=None,
    )  # fmt: skip
    assert not problems
    rows = [Tile.row(call, tile, jnp.int32(n)).reach() for n in range(B * -(-T // tile.T))]
    return [tuple(range(int(first), int(end))) for first, end in rows]


PACKED = np.repeat([0, 1, 2], [5, 4, 3])[None]
# mask, T, S, (queries, keys) in a tile → the columns that each row of tiles visits.
SKIPPED = {
    "all": (Mask(), 12, 12, (4, 4), [(0, 1, 2)] * 3),
    "causal": (Mask.causal(), 12, 12, (4, 4), [(0,), (0, 1), (0, 1, 2)]),
    "causal, bottom right": (Mask.causal(4), 8, 12, (4, 4), [(0, 1), (0, 1, 2)]),
    "causal, traced offset": (Mask.causal(np.array([4])), 8, 12, (4, 4), [(0, 1), (0, 1, 2)]),
    "window": (Mask.window(3, 0), 12, 12, (4, 4), [(0,), (0, 1), (1, 2)]),
    "lengths": (Mask.lengths(np.array([5])), 8, 12, (4, 4), [(0, 1), (0, 1)]),
    "no keys at all": (Mask.lengths(np.array([0])), 4, 12, (4, 4), [()]),
    "packed sequences": (
        Mask.segments(PACKED, PACKED),
        12,
        12,
        (4, 4),
        [(0, 1), (0, 1, 2), (1, 2)],
    ),
    "ragged edges": (Mask.causal(), 7, 7, (3, 3), [(0,), (0, 1), (0, 1, 2)]),
}


@pytest.mark.parametrize("name", SKIPPED)
def test_tiles_that_cannot_contribute_are_not_visited(name):
    mask, T, S, (queries, keys), wanted = SKIPPED[name]
    assert reaches(mask, T, S, Sizes(1, queries, keys)) == wanted


def test_lengths_skip_for_each_batch_row_by_itself():
    mask = Mask.lengths(np.array([3, 12]))
    assert reaches(mask, 4, 12, Sizes(1, 4, 4), B=2) == [(0,), (0, 1, 2)]


# --- the sizes of tiles ------------------------------------------------------------------------

# (T, S, N, K), band → (heads, queries, keys) in a tile.
TILES = {
    "long": ((4096, 4096, 8, 8), Mask(), (4, 1024, 256)),
    "long, causal": ((4096, 4096, 8, 8), Mask.causal(), (8, 512, 256)),
    "grouped": ((4096, 4096, 32, 8), Mask(), (1, 1024, 256)),
    "multi-query": ((4096, 4096, 16, 1), Mask(), (1, 256, 256)),
    "heads that 4 does not divide": ((4096, 4096, 7, 7), Mask(), (1, 1024, 256)),
    "few queries": ((64, 8192, 8, 8), Mask(), (8, 64, 256)),
    "short": ((5, 7, 6, 3), Mask(), (3, 5, 7)),
    "more heads in a group than a tile has rows": ((9, 512, 8192, 1), Mask(), (1, 1, 256)),
}


@pytest.mark.parametrize("name", TILES)
def test_a_tile_has_a_million_scores_at_most(name):
    (T, S, N, K), mask, wanted = TILES[name]
    q, k, v, _ = abstract(T, S, N=N, K=K)
    call, _ = checked_call(
        q, k, v, mask, is_causal=False, bias=None, scale=None, softcap=None, dropout=None,
        precision=None,
    )  # fmt: skip
    assert blocked.tile_sizes(call) == Sizes(*wanted)


# --- under transformations -----------------------------------------------------------------------


def test_dropout_is_the_same_whatever_the_tiles_and_as_dense_draws_it():
    *arrays, cotangent = example(dtype=np.float32)
    dropout = Dropout(0.4, key=jax.random.key(11))
    outs = [
        in_tiles(Sizes(*t), *arrays, cotangent, dropout=dropout) for t in [(3, 7, 11), (1, 2, 3)]
    ]
    outs.append(value_and_gradients("dense", *arrays, cotangent, dropout=dropout))
    plain = value_and_gradients("dense", *arrays, cotangent)
    for got, want, other in zip(outs[0], outs[1], plain, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=64 * 2.0**-24 * np.abs(want).max())
        assert np.abs(got - other).max() > 0.01
    np.testing.assert_allclose(outs[0][0], outs[2][0], rtol=0, atol=64 * 2.0**-24 * 4)


def test_second_derivatives_are_dense_s():
    with jax.enable_x64(True):
        arrays = [jnp.asarray(x) for x in example()[:3]]

        def penalty(implementation, *arrays):
            def loss(*arrays):
                out = dot_product_attention(*arrays, is_causal=True, implementation=implementation)
                return (out**2).sum()

            return sum((g**2).sum() for g in jax.grad(loss, argnums=(0, 1, 2))(*arrays))

        got, want = (
            jax.jit(jax.grad(functools.partial(penalty, name), argnums=(0, 1, 2)))(*arrays)
            for name in ("blocked", "dense")
        )
        for a, b in zip(got, want, strict=True):
            assert np.abs(a - b).max() <= 1e-12 * np.abs(b).max()


def test_forward_mode_is_an_error_that_says_so():
    q, k, v, _ = example(dtype=np.float32)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda q: dot_product_attention(q, k, v, implementation="blocked"), (q,), (q,))


def test_vmap_over_lengths_of_their_own():
    q, k, v, _ = example(dtype=np.float32)
    lengths = np.array([[3, 11], [7, 0]])

    def run(q, lengths):
        mask = Mask.lengths(lengths)
        return dot_product_attention(q, k, v, mask, implementation="blocked")

    got = jax.jit(jax.vmap(run))(np.stack([q, 2 * q]), lengths)
    for i in range(2):
        want = dot_product_attention(
            (i + 1) * q, k, v, Mask.lengths(lengths[i]), implementation="dense"
        )
        np.testing.assert_allclose(got[i], want, rtol=0, atol=64 * 2.0**-24 * 4)


def test_an_empty_batch_gives_an_empty_output():
    q, k, v = (jnp.ones((0, n, 2, 3)) for n in (4, 5, 5))
    assert dot_product_attention(q, k, v, implementation="blocked").shape == (0, 4, 2, 3)
