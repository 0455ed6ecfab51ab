"""Biases by where query and key are: the definition, transformers' own, and both frameworks'."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.t5.modeling_t5 import T5Attention

from helpers.attention import attention_definition as definition
from helpers.attention.small_attention import (
    B,
    D,
    K,
    N,
    S,
    T,
    build,
    by_definition,
    inputs,
)
from jax_attn.attention import Alibi, ArgumentError, alibi
from jax_attn.attention.position_bias import alibi_slopes, relative_buckets
from jax_attn.nn import GroupedQueryAttention, RelativeBias
from jax_attn.transfer import load
from jax_attn.transfer.table.layouts import EMBEDDING
from torch_ref import position_bias as torch_bias

U = 2.0**-24
HEADS = (1, 2, 5, 8, 12, 16, 71, 112)  # powers of two, between them; Falcon's, BLOOM's


@pytest.mark.parametrize("heads", HEADS)
def test_alibi_is_bloom_s_but_for_a_number_a_head(heads):
    """transformers rounds a base, its n-th power, a product; we round once."""
    S = 37
    got = np.asarray(alibi(heads, S), np.float64)
    want = build_alibi_tensor(torch.ones(1, S), heads, torch.float32).double().numpy()
    shifted = want - want[..., -1:]
    powers = np.arange(1, heads + 1)[:, None, None] + 4
    assert (np.abs(got - shifted) <= powers * U * (np.abs(got) + 2 * want)).all()
    assert np.abs(1.001 * got - shifted).max() > 100 * U


# As Press et al. write it out, T×S.
SLOPES = 2.0 ** -np.array([2, 4, 6, 8, 1, 3])
DISTANCE = np.arange(S) - np.arange(T)[:, None]
WRITTEN_OUT = SLOPES[:, None, None] * DISTANCE


@pytest.mark.slow
def test_a_call_s_own_bias_is_added_to_it():
    module, given = build(position_bias=Alibi(N)), inputs()
    more = np.random.default_rng(1).standard_normal((B, N, T, S)).astype(np.float32)
    out, budget, _, _ = by_definition(module, *given, bias=more + WRITTEN_OUT)
    assert definition.worst(module(*given, bias=more), out, budget) <= 1
    assert definition.worst(module(*given), out, budget) > 100


# buckets, max_distance: T5's own, fewer, odd, and with bounds that are whole logarithms.
BUCKETS = [(32, 128), (8, 20), (31, 128), (64, 1024), (12, 24), (128, 512)]


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "longest"), BUCKETS)
def test_buckets_are_t5_s_in_both_frameworks(buckets, longest, bidirectional):
    distance = np.arange(-5000, 5001)
    how = {"buckets": buckets, "max_distance": longest, "bidirectional": bidirectional}
    want = T5Attention._relative_position_bucket(
        torch.from_numpy(distance), bidirectional, buckets, longest
    ).numpy()
    np.testing.assert_array_equal(relative_buckets(distance, **how), want)
    theirs = [torch_bias.relative_bucket(int(d), **how) for d in distance]
    np.testing.assert_array_equal(theirs, want)
    how["max_distance"] //= 2
    assert (relative_buckets(distance, **how) != want).any()


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("T", "S"), [(5, 11), (11, 5), (13, 1)])
def test_a_learned_bias_is_the_same_in_both_frameworks(T, S, bidirectional):
    how = {"buckets": 8, "max_distance": 9, "bidirectional": bidirectional}
    theirs = torch_bias.RelativeBias(N, **how)
    ours = nnx.eval_shape(lambda: RelativeBias(N, **how, rngs=nnx.Rngs(0)))
    load(ours, theirs.state_dict(), EMBEDDING)
    got, want = ours(T, S), theirs(T, S).detach().numpy()
    assert got.shape == (N, T, S)
    np.testing.assert_array_equal(got, want)
    assert np.unique(np.asarray(got)[0]).size > 3


@pytest.mark.slow
def test_several_modules_hold_one_learned_bias():
    shared = RelativeBias(N, rngs=nnx.Rngs(0))
    blocks = nnx.List(build(position_bias=shared) for _ in range(2))
    paths = [path for path, _ in nnx.to_flat_state(nnx.state(blocks, nnx.Param))]
    assert [path for path in paths if "position_bias" in path] == [
        (0, "position_bias", "embedding")
    ]
    np.testing.assert_array_equal(*(block.position_bias(T, T) for block in blocks))


def alone(bias):
    """A module whose keys and values are its queries."""
    return build(kdim=None, vdim=None, position_bias=bias)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_what_is_rounded_is_rounded_in_every_program(transform):
    """As torch rounds it. XLA leaves out a cast to bfloat16 and back if it compiles both."""
    positions, slopes = np.arange(300), alibi_slopes(12)
    products = slopes.astype(jnp.bfloat16)[:, None] * positions.astype(jnp.bfloat16)
    found = transform(lambda at: Alibi(12, 0.25, rounded=True).slopes.bias(at))(positions[None])
    assert np.array_equal(found[0, :, 0], 0.25 * products.astype(np.float32))


REFUSALS = {
    "buckets": (
        lambda: RelativeBias(N, buckets=3, rngs=nnx.Rngs(0)),
        r"buckets: expected an int ≥ 4, got 3",
    ),
    "distances": (
        lambda: RelativeBias(N, max_distance=8, rngs=nnx.Rngs(0)),
        r"max_distance: expected more than the 8 nearest distances, got 8",
    ),
    "all at once": (
        lambda: RelativeBias(0, buckets=2.5, bidirectional=1, rngs=nnx.Rngs(0)),
        r"(?s)3 problems:.*num_heads: .*buckets: .*bidirectional: ",
    ),
    "heads": (lambda: Alibi(0), r"num_heads: expected an int ≥ 1, got int 0"),
    "factor": (lambda: Alibi(3, -1.0), r"factor: expected a finite number > 0, got float -1.0"),
    "rounded": (lambda: Alibi(3, rounded=1), r"rounded: expected True or False, got int 1"),
    "not called": (
        lambda: GroupedQueryAttention(D, N, K, position_bias="alibi", rngs=nnx.Rngs(0)),
        r"position_bias: expected a function of .*, got str 'alibi'",
    ),
    "other heads": (
        lambda: build(position_bias=Alibi(N + 1))(*inputs()),
        rf"bias: expected a shape that broadcasts to .*, got float32\[{N + 1}, 1, {S}\]",
    ),
    "a cache": (
        lambda: alone(lambda T, S: None)(inputs()[0], cache=alone(None).empty_cache(B, T)),
        r"cache: expected a position_bias that is an Alibi",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_does_not_fit_is_refused(name):
    call, message = REFUSALS[name]
    with pytest.raises(ArgumentError, match=message):
        call()
