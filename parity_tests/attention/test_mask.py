"""Mask: what each constructor lets through, how masks meet, and that they travel as pytrees."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_attn.attention import ArgumentError, Mask

pytestmark = pytest.mark.filterwarnings("error")

B, N, T, S = 2, 3, 5, 7


def written_out(visible):
    """The array of visible(b, n, i, j), one pair at a time."""
    allowed = np.zeros((B, N, T, S), bool)
    for b, n, i, j in itertools.product(*map(range, (B, N, T, S))):
        allowed[b, n, i, j] = visible(b, n, i, j)
    return allowed


def materialized(mask):
    return np.broadcast_to(np.asarray(mask.materialize(T, S)), (B, N, T, S))


OFFSETS, LENGTHS = np.array([-2, 3]), np.array([4, 0])
Q_SEGMENTS = np.array([[0, 0, 1, 1, 2], [1, 1, 0, 2, 2]])
KV_SEGMENTS = np.array([[0, 1, 1, 2, 2, 2, 0], [2, 2, 2, 2, 1, 1, 1]])
RNG = np.random.default_rng(0)
ARRAY_TS, ARRAY_BNTS = RNG.random((T, S)) < 0.5, RNG.random((B, N, T, S)) < 0.5
ARRAY_B11S = RNG.random((B, 1, 1, S)) < 0.5

ROWS = {
    "open": (Mask(), lambda b, n, i, j: True),
    "causal": (Mask.causal(), lambda b, n, i, j: j <= i),
    "causal, bottom right": (Mask.causal(S - T), lambda b, n, i, j: j <= i + 2),
    "causal, empty first rows": (Mask.causal(-2), lambda b, n, i, j: j <= i - 2),
    "causal by row": (Mask.causal(OFFSETS), lambda b, n, i, j: j <= i + OFFSETS[b]),
    "causal, one traced offset": (Mask.causal(jnp.asarray(1)), lambda b, n, i, j: j <= i + 1),
    "window": (Mask.window(2, 1), lambda b, n, i, j: i - 2 <= j <= i + 1),
    "window, left open": (Mask.window(None, 1), lambda b, n, i, j: j <= i + 1),
    "window, right open": (Mask.window(1, None), lambda b, n, i, j: i - 1 <= j),
    "window, both open": (Mask.window(None, None), lambda b, n, i, j: True),
    "window, offset": (Mask.window(1, 0, 2), lambda b, n, i, j: i + 1 <= j <= i + 2),
    "window by row": (
        Mask.window(1, 2, OFFSETS),
        lambda b, n, i, j: i + OFFSETS[b] - 1 <= j <= i + OFFSETS[b] + 2,
    ),
    "window wider than int32": (Mask.window(2**40, 2**40), lambda b, n, i, j: True),
    "window wider than int32 by row": (
        Mask.window(2**40, 0, OFFSETS),
        lambda b, n, i, j: j <= i + OFFSETS[b],
    ),
    "window far beyond int32": (
        Mask.window(2**40, 3, [2**40 + 1, -(2**33)]),
        lambda b, n, i, j: b == 0 and j >= i + 1,
    ),
    "window whose end passes int32's": (
        Mask.window(None, 3, offset=[2**31 - 1, -(2**31)]),
        lambda b, n, i, j: b == 0,
    ),
    "likewise, of JAX": (
        Mask.window(None, 3, offset=jnp.array([2**31 - 1, -(2**31)])),
        lambda b, n, i, j: b == 0,
    ),
    "offset in uint32": (
        Mask.causal(jnp.array([2**32 - 1, 2], jnp.uint32)),
        lambda b, n, i, j: b == 0 or j <= i + 2,
    ),
    "offset in int8": (
        Mask.window(2, 127, np.array([1, 127], np.int8)),
        lambda b, n, i, j: b == 0 and i - 1 <= j,
    ),
    "lengths beyond int64": (
        Mask.lengths(np.array([2**63 + 1, 2**32 + 1], np.uint64)),
        lambda b, n, i, j: True,
    ),
    "lengths far below 0": (
        Mask.lengths(np.array([-(2**63), -(2**32) + 3])),
        lambda b, n, i, j: False,
    ),
    "one length as a Python integer": (Mask.lengths(2**70), lambda b, n, i, j: True),
    "lengths in uint8": (
        Mask.lengths(np.array([255, 3], np.uint8)),
        lambda b, n, i, j: b == 0 or j < 3,
    ),
    "lengths": (Mask.lengths(LENGTHS), lambda b, n, i, j: j < LENGTHS[b]),
    "lengths as a list": (Mask.lengths([4, 0]), lambda b, n, i, j: j < LENGTHS[b]),
    "segments": (
        Mask.segments(Q_SEGMENTS, KV_SEGMENTS),
        lambda b, n, i, j: Q_SEGMENTS[b, i] == KV_SEGMENTS[b, j],
    ),
    "array (T, S)": (Mask.array(ARRAY_TS), lambda b, n, i, j: ARRAY_TS[i, j]),
    "array (B, N, T, S)": (Mask.array(ARRAY_BNTS), lambda b, n, i, j: ARRAY_BNTS[b, n, i, j]),
    "array (B, 1, 1, S)": (Mask.array(ARRAY_B11S), lambda b, n, i, j: ARRAY_B11S[b, 0, 0, j]),
}
rows = pytest.mark.parametrize("name", ROWS)


@rows
def test_materialize_is_the_definition(name):
    mask, visible = ROWS[name]
    assert np.array_equal(materialized(mask), written_out(visible))


@rows
def test_a_mask_is_a_pytree_with_static_ints(name):
    mask, _ = ROWS[name]
    leaves, structure = jax.tree.flatten(mask)
    assert all(isinstance(leaf, (np.ndarray, jax.Array)) for leaf in leaves)
    again = jax.tree.unflatten(structure, leaves)
    assert (again.lo, again.hi) == (mask.lo, mask.hi) or isinstance(mask.hi, np.ndarray | jax.Array)
    assert np.array_equal(materialized(again), materialized(mask))
    assert jax.tree.structure(again) == structure


def test_masks_of_one_kind_compile_once():
    traces = []

    @jax.jit
    def count(mask):
        traces.append(None)
        return mask.materialize(T, S).sum()

    for offset in (0, 0, 1):
        count(Mask.causal(offset))
    for offsets in ([1, 2], [3, 4]):
        count(Mask.causal(jnp.asarray(offsets)))
    assert len(traces) == 3


def test_vmap_and_scan_take_a_mask_apart():
    want = [np.asarray((Mask.causal(o) & Mask.array(ARRAY_TS)).materialize(T, S)) for o in range(4)]
    masks = jax.vmap(Mask.causal)(jnp.arange(4))
    _, scanned = jax.lax.scan(lambda c, mask: (c, mask.materialize(T, S)), 0, masks)
    assert np.array_equal(np.asarray(scanned) & ARRAY_TS, want)
    both = jax.vmap(lambda mask: mask.materialize(T, S))(masks)
    assert np.array_equal(both, scanned)


bounds = st.none() | st.integers(0, 4)
offsets = st.integers(-6, 6) | st.lists(st.integers(-6, 6), min_size=B, max_size=B).map(np.array)
bands = st.builds(Mask.window, bounds, bounds, offsets)
lengths = st.lists(st.integers(0, S), min_size=B, max_size=B).map(Mask.lengths)
segments = st.integers(0, 99).map(
    lambda seed: Mask.segments(
        *(np.random.default_rng(seed).integers(0, 3, s) for s in ((B, T), (B, S)))
    )
)
arrays = st.tuples(st.integers(0, 99), st.sampled_from([(T, S), (B, 1, 1, S), (B, N, T, S)])).map(
    lambda pair: Mask.array(np.random.default_rng(pair[0]).random(pair[1]) < 0.7)
)
unsegmented = st.one_of(bands, lengths, arrays, st.builds(Mask.__and__, bands, arrays))
anything = st.one_of(unsegmented, segments, st.builds(Mask.__and__, segments, lengths))


@settings(max_examples=60)
@given(anything, unsegmented)
def test_and_is_where_both_allow_it(a, b):
    both = materialized(a) & materialized(b)
    assert np.array_equal(materialized(a & b), both)
    assert np.array_equal(materialized(b & a), both)


@settings(max_examples=30)
@given(anything, unsegmented, unsegmented)
def test_and_is_associative_and_open_is_its_unit(a, b, c):
    assert np.array_equal(materialized((a & b) & c), materialized(a & (b & c)))
    assert np.array_equal(materialized(a & Mask()), materialized(a))
    assert np.array_equal(materialized(b & b), materialized(b))


def test_two_static_bands_stay_static():
    both = Mask.causal(1) & Mask.window(3, 5)
    assert (both.lo, both.hi) == (-3, 1)
    assert not jax.tree.leaves(both)


def test_only_a_mask_without_conditions_is_open():
    assert Mask().is_open
    assert Mask.window(None, None).is_open
    assert not Mask.causal().is_open


class TestTorchMasks:
    """torch.nn.MultiheadAttention says True = ignore; per-head masks come as (B·N, T, S)."""

    IGNORE_TS, IGNORE_BS = RNG.random((T, S)) < 0.4, RNG.random((B, S)) < 0.4
    IGNORE_BNTS = RNG.random((B, N, T, S)) < 0.4

    def test_neither_lets_everyone_through(self):
        assert Mask.from_torch_mha(None, None, N).is_open

    def test_attn_mask(self):
        got = materialized(Mask.from_torch_mha(self.IGNORE_TS, None, N))
        assert np.array_equal(got, written_out(lambda b, n, i, j: not self.IGNORE_TS[i, j]))

    def test_attn_mask_per_head_and_key_padding_mask(self):
        per_head = self.IGNORE_BNTS.reshape(B * N, T, S)
        for wrap in (np.asarray, jnp.asarray):
            got = Mask.from_torch_mha(wrap(per_head), wrap(self.IGNORE_BS), N)
            want = ~self.IGNORE_BNTS & ~self.IGNORE_BS[:, None, None, :]
            assert np.array_equal(materialized(got), want)

    def test_key_padding_mask(self):
        got = materialized(Mask.from_torch_mha(None, self.IGNORE_BS, N))
        assert np.array_equal(got, written_out(lambda b, n, i, j: not self.IGNORE_BS[b, j]))

    @pytest.mark.parametrize(
        ("attn_mask", "key_padding_mask", "num_heads", "says"),
        [
            (np.zeros((T, S), np.float32), None, N, "attn_mask.*adds to the scores.*bias="),
            (None, np.zeros((B, S), np.float32), N, r"bias=key_padding_mask\[:, None, None, :\]"),
            (np.zeros((T, S), np.uint8), None, N, "attn_mask: expected boolean.*uint8"),
            (np.zeros((5, T, S), bool), None, N, r"attn_mask: expected \(T, S\) or \(B·3, T, S\)"),
            (None, np.zeros(S, bool), N, r"key_padding_mask: expected \(B, S\)"),
            (None, None, 0, "num_heads: expected an int ≥ 1"),
            (
                np.zeros((5, T, S), np.uint8),
                None,
                0,
                "num_heads: expected(.|\n)*attn_mask: expected",
            ),
            (np.array(True), None, N, r"attn_mask: expected \(T, S\)"),
        ],
    )
    def test_what_is_no_boolean_mask_is_told(self, attn_mask, key_padding_mask, num_heads, says):
        with pytest.raises(TypeError, match=says):
            Mask.from_torch_mha(attn_mask, key_padding_mask, num_heads)


class TestZeroOneMasks:
    @pytest.mark.parametrize("dtype", ["int32", "float32", "bool", "uint8"])
    @pytest.mark.parametrize("shape", [(T, S), (B, 1, 1, S), (B, N, T, S)])
    def test_one_is_visible(self, dtype, shape):
        ones = np.random.default_rng(1).integers(0, 2, shape)
        for wrap in (np.asarray, jnp.asarray):
            got = materialized(Mask.from_zero_one(wrap(ones.astype(dtype))))
            assert np.array_equal(got, np.broadcast_to(ones == 1, (B, N, T, S)))

    def test_rank_3_is_per_batch_row_even_where_b_equals_n(self):
        ones = np.random.default_rng(2).integers(0, 2, (2, T, S))
        got = np.asarray(Mask.from_zero_one(ones).materialize(T, S))
        assert np.array_equal(got, ones[:, None] == 1)

    def test_traced_values_are_taken_at_their_word(self):
        ones = np.random.default_rng(3).integers(0, 2, (T, S))
        got = jax.jit(lambda m: Mask.from_zero_one(m).materialize(T, S))(ones)
        assert np.array_equal(got[0, 0], ones == 1)

    @pytest.mark.parametrize(
        ("mask", "says"),
        [
            (np.array([[0, 2]]), "expected only 0 and 1, got 2"),
            (np.array([[0.0, -np.inf]]), "expected only 0 and 1, got -inf"),
            (np.array([[1.0, np.nan]]), "expected only 0 and 1, got nan"),
            (np.array([0, 1]), r"expected \(T, S\), \(B, T, S\) or \(B, N, T, S\)"),
        ],
    )
    def test_other_values_and_ranks_are_told(self, mask, says):
        with pytest.raises(ValueError, match=says):
            Mask.from_zero_one(mask)


REFUSED = {
    "window of -1 for open": (lambda: Mask.window(-1, 0), "left: expected an int ≥ 0, or None"),
    "window of True": (lambda: Mask.window(0, True), "right: expected an int"),
    "window of a float": (lambda: Mask.window(1.0, None), "left: expected an int"),
    "offset of a float": (lambda: Mask.causal(0.5), "offset: expected integers"),
    "offset of True": (lambda: Mask.causal(True), "offset: expected integers"),
    "offsets of rank 2": (lambda: Mask.causal(np.ones((2, 2), int)), "offset: expected an int or"),
    "float lengths": (lambda: Mask.lengths(np.ones(2)), "kv_lengths: expected integers"),
    "lengths of rank 2": (lambda: Mask.lengths(np.ones((2, 1), int)), r"kv_lengths: .*\(B,\)"),
    "ragged lengths": (lambda: Mask.lengths([[1], [1, 2]]), "kv_lengths: expected integers.* list"),
    "lengths of torch": (
        lambda: Mask.lengths(pytest.importorskip("torch").ones(2, dtype=int)),
        r"kv_lengths: expected integers.* got torch\.int64\[2\]",
    ),
    "a ragged mask": (lambda: Mask.from_zero_one([[1], [1, 0]]), "mask: expected an array, got li"),
    "segments of rank 1": (
        lambda: Mask.segments(np.ones(2, int), np.ones((2, 3), bool)),
        r"(?s)q_segments: expected \(B, T\).*kv_segments: expected integers",
    ),
    "segments beyond int32": (
        lambda: Mask.segments([[1]], [[1, 2**32 + 1]]),
        "kv_segments: expected integers within int32, got 4294967297",
    ),
    "segments beyond int32, both and of other dtypes": (
        lambda: Mask.segments(np.array([[-(2**40)]]), jnp.array([[2**32 - 1]], jnp.uint32)),
        r"(?s)q_segments: .* got -1099511627776.*kv_segments: .* got 4294967295",
    ),
    "traced segments that no dtype tells apart": (
        lambda: jax.eval_shape(Mask.segments, jnp.ones((1, 1), jnp.uint32), jnp.ones((1, 1), int)),
        r"q_segments, kv_segments: expected one dtype, got uint32\[1, 1\] and int32\[1, 1\]",
    ),
    "array of ints": (lambda: Mask.array(np.ones((2, 3), int)), "allowed: expected boolean"),
    "array of rank 3": (
        lambda: Mask.array(np.ones((2, 3, 5), bool)),
        r"\(B, T, S\) and as \(N, T, S\): make it \[:, None\], \(2, 1, 3, 5\), or \[None\]",
    ),
    "array of rank 1": (lambda: Mask.array(np.ones(3, bool)), r"rank 2 \(T, S\) or 4"),
    "array of a list": (lambda: Mask.array([[True]]), "expected a boolean array, got list"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_constructor_refuses(name):
    make, says = REFUSED[name]
    with pytest.raises(ArgumentError, match=says):
        make()


@pytest.mark.parametrize("other", [ARRAY_TS, jnp.asarray(ARRAY_TS), None, True], ids=repr)
def test_and_with_what_is_no_mask_is_told(other):
    with pytest.raises(TypeError, match=r"expected a Mask; wrap a boolean array in Mask.array"):
        Mask.causal() & other
    with pytest.raises(TypeError, match=r"expected a Mask; wrap a boolean array in Mask.array"):
        other & Mask.causal()


def test_what_cannot_be_intersected_is_told():
    segmented = Mask.segments(Q_SEGMENTS, KV_SEGMENTS)
    with pytest.raises(ValueError, match="both have segments; combine the two ids"):
        segmented & segmented
    with pytest.raises(ValueError, match=r"allowed bool\[2, 3\] and bool\[3, 2\] do not broadcast"):
        Mask.array(np.ones((2, 3), bool)) & Mask.array(np.ones((3, 2), bool))
    with pytest.raises(ValueError, match=r"kv_lengths int32\[2\] and int32\[3\]"):
        Mask.lengths([1, 2]) & Mask.lengths([1, 2, 3])


def test_problems_name_what_does_not_fit():
    mask = Mask.causal(np.arange(3)) & Mask.segments(Q_SEGMENTS, KV_SEGMENTS)
    assert Mask.causal(OFFSETS).problems(B, N, T, S) == []
    found = " ".join(mask.problems(B, N, T + 1, S))
    assert "mask (band): expected a shape that broadcasts to (B,) = (2,), got int32[3]" in found
    assert "mask (q_segments): expected a shape that broadcasts to (B, T) = (2, 6)" in found
    assert "kv_segments" not in found


def test_repr_says_what_is_set():
    assert repr(Mask.window(2, None) & Mask.lengths([1, 2])) == "Mask(lo=-2, kv_lengths=int32[2])"
