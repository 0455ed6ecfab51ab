"""Weights between the two rotary conventions: a step in a table, by which attention stays."""

import numpy as np
import pytest
from flax import nnx

from helpers.attention.small_attention import numpy_weights
from jax_attn import transfer
from jax_attn.attention import Rotary
from jax_attn.nn import GroupedQueryAttention
from jax_attn.transfer import LAYOUTS, to_half_split, to_interleaved

B, T, N, K, H, D = 2, 13, 6, 3, 20, 30
BASE = 1e4
U = 2.0**-24


def converted(port: dict, step, *parts) -> dict:
    """The torch tensors of a module's weights, read again through a step."""
    shapes = {path: x.shape for path, x in port.items()}
    return LAYOUTS["gqa"].through(step, *parts).to_flax(LAYOUTS["gqa"].to_torch(port), shapes)


def built(rotary):
    options = {"qk_norm": nnx.LayerNorm, "rotary": rotary, **numpy_weights()}
    return GroupedQueryAttention(D, N, K, head_dim=H, **options)


def weights_of(module):
    rng = np.random.default_rng(2)
    paths = transfer.flatten(module)
    return {p: rng.standard_normal(x.shape).astype(np.float32) for p, x in paths.items()}


TURNED = ("q_proj", "k_proj", "q_norm", "k_norm")
DIRECTIONS = {"to_half_split": (to_half_split, True), "to_interleaved": (to_interleaved, False)}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dim"), [("to_half_split", None), ("to_interleaved", 8)])
def test_converted_weights_compute_the_same_attention(name, dim):
    step, interleaved = DIRECTIONS[name]
    before, after = built(Rotary(BASE, dim, interleaved)), built(Rotary(BASE, dim, not interleaved))
    weights = weights_of(before)
    x = np.random.default_rng(3).standard_normal((B, T, D)).astype(np.float32)

    def output(module, weights):
        transfer.load(module, LAYOUTS["gqa"].to_torch(weights), LAYOUTS["gqa"])
        return np.asarray(attend(module, x))

    attend = nnx.jit(lambda module, x: module(x))
    want = output(before, weights)
    got = output(after, converted(weights, step(dim), *TURNED))
    # The same sums in another order; scores reach some 100, and weights err by as many u.
    bound = 1000 * U * np.abs(want).max()
    assert np.abs(got - want).max() <= bound
    for parts in (TURNED[:1], TURNED[:2]):
        half_done = output(after, converted(weights, step(dim), *parts))
        assert np.abs(half_done - want).max() > 100 * bound
    assert np.abs(output(after, weights) - want).max() > 100 * bound


@pytest.mark.parametrize("dim", [None, 8])
@pytest.mark.parametrize("name", DIRECTIONS)
def test_the_step_comes_back_bit_for_bit_and_undoes_the_other(name, dim):
    step, _ = DIRECTIONS[name]
    layout = LAYOUTS["gqa"].through(step(dim), *TURNED)
    weights = weights_of(built(Rotary()))
    back = layout.to_flax(layout.to_torch(weights), {p: x.shape for p, x in weights.items()})
    (other,) = (made for made, _ in DIRECTIONS.values() if made is not step)
    undone = converted(converted(weights, step(dim), *TURNED), other(dim), *TURNED)
    moved = converted(weights, step(dim), *TURNED)
    for path, x in weights.items():
        assert np.array_equal(back[path], x)
        assert np.array_equal(undone[path], x)
        assert np.array_equal(moved[path], x) == (path.split(".")[0] not in TURNED)
        assert np.array_equal(moved[path][..., dim or H :], x[..., dim or H :])


STEP_REFUSED = {
    "odd dim": (lambda: to_half_split(3), "dim: expected an even int ≥ 2, or None, got 3"),
    "unknown part": (
        lambda: LAYOUTS["gqa"].through(to_half_split(), "query"),
        r"through: expected parts among .*'q_proj'.*, got \['query'\]",
    ),
    "packed row": (
        lambda: LAYOUTS["fused_mha"].through(to_half_split(), "q_proj", "k_proj"),
        "through: expected rows of only q_proj, k_proj, got row",
    ),
    "more than a head has": (
        lambda: converted(weights_of(built(Rotary())), to_half_split(22), "q_proj"),
        r"to_half_split\(22\) expects a last axis of at least 22",
    ),
}


@pytest.mark.parametrize("name", STEP_REFUSED)
def test_the_step_refuses_by_name(name):
    call, message = STEP_REFUSED[name]
    with pytest.raises(ValueError, match=message):
        call()


def test_the_table_names_the_step():
    layout = LAYOUTS["gqa"].through(to_half_split(8), "q_proj")
    assert layout.row_of("q_proj.bias") == "q_proj.bias -> q_proj.bias [heads to_half_split(8)]"
    assert layout.row_of("k_proj.bias") == "k_proj.bias -> k_proj.bias [heads]"
