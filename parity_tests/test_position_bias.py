"""Biases by where query and key are: the definition, transformers' own, and both frameworks'."""

import numpy as np
import pytest
import torch
from flax import nnx
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.t5.modeling_t5 import T5Attention

import torch_ref
from jax_attn.attention import Alibi, ArgumentError, alibi
from jax_attn.attention.position_bias import relative_buckets
from jax_attn.nn import GroupedQueryAttention, RelativeBias
from jax_attn.transfer import LAYOUTS, load
from jax_attn.transfer.layouts import EMBEDDING
from torch_ref import position_bias as torch_bias

U = 2.0**-24
B, T, N, K, H, D = 2, 13, 6, 3, 5, 32
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


@pytest.mark.parametrize("heads", HEADS)
def test_alibi_is_the_same_in_both_frameworks(heads):
    ours = np.asarray(alibi(heads, 37, factor=0.3), np.float64)
    theirs = torch_bias.alibi(heads, 37, factor=0.3).double().numpy()
    assert (np.abs(ours - theirs) <= 5 * U * np.abs(ours)).all()


def pair(ours, theirs):
    """Both modules with these biases and the same weights."""
    torch.manual_seed(0)
    reference = torch_ref.DESIGNS["gqa"](D, N, K, head_dim=H, position_bias=theirs).eval()
    port = GroupedQueryAttention(D, N, K, head_dim=H, position_bias=ours, rngs=nnx.Rngs(0))
    load(port, reference.state_dict(), LAYOUTS["gqa"])
    port.eval()
    return reference, port


X = np.random.default_rng(0).standard_normal((B, T, D)).astype(np.float32)


def test_a_module_adds_it():
    reference, port = pair(Alibi(N), torch_bias.Alibi(N))
    plain = pair(None, None)[1]
    # As Press et al. write it, T×S, for the queries of a causal model.
    slopes = 2.0 ** -np.array([2, 4, 6, 8, 1, 3])
    written_out = slopes[:, None, None] * (np.arange(T) - np.arange(T)[:, None])
    want = plain(X, is_causal=True, bias=written_out.astype(np.float32))
    weights = plain.attention_weights(X, is_causal=True, bias=written_out.astype(np.float32))
    found = {
        "output": (port(X, is_causal=True), want),
        "weights": (port.attention_weights(X, is_causal=True), weights),
        "torch": (reference(torch.from_numpy(X), is_causal=True).detach().numpy(), want),
    }
    for name, (got, want) in found.items():
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-6, err_msg=name)
    assert np.abs(plain(X, is_causal=True) - want).max() > 0.01


def test_a_call_s_own_bias_is_added_to_it():
    _, port = pair(Alibi(N), None)
    more = np.random.default_rng(1).standard_normal((B, N, T, T)).astype(np.float32)
    want = pair(None, None)[1](X, bias=more + np.asarray(alibi(N, T)))
    np.testing.assert_allclose(port(X, bias=more), want, rtol=0, atol=1e-6)


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
def test_a_learnt_bias_is_the_same_in_both_frameworks(T, S, bidirectional):
    how = {"buckets": 8, "max_distance": 9, "bidirectional": bidirectional}
    theirs = torch_bias.RelativeBias(N, **how)
    ours = RelativeBias(N, **how, rngs=nnx.Rngs(0))
    load(ours, theirs.state_dict(), EMBEDDING)
    got, want = ours(T, S), theirs(T, S).detach().numpy()
    assert got.shape == (N, T, S)
    np.testing.assert_array_equal(got, want)
    assert np.unique(np.asarray(got)[0]).size > 3


def test_several_modules_hold_one_learnt_bias():
    shared = RelativeBias(N, rngs=nnx.Rngs(0))
    blocks = nnx.List(
        GroupedQueryAttention(D, N, K, head_dim=H, position_bias=shared, rngs=nnx.Rngs(0))
        for _ in range(2)
    )
    paths = [path for path, _ in nnx.to_flat_state(nnx.state(blocks, nnx.Param))]
    assert [path for path in paths if "position_bias" in path] == [
        (0, "position_bias", "embedding")
    ]
    np.testing.assert_array_equal(*(block.position_bias(T, T) for block in blocks))


REFUSALS = {
    "buckets": (
        lambda: RelativeBias(N, buckets=3, rngs=nnx.Rngs(0)),
        r"buckets: expected an int ≥ 4, got 3",
    ),
    "distances": (
        lambda: RelativeBias(N, max_distance=8, rngs=nnx.Rngs(0)),
        r"max_distance: expected more than the 8 near ones, got 8",
    ),
    "all at once": (
        lambda: RelativeBias(0, buckets=2.5, bidirectional=1, rngs=nnx.Rngs(0)),
        r"(?s)3 problems:.*num_heads: .*buckets: .*bidirectional: ",
    ),
    "heads": (lambda: Alibi(0), r"num_heads: expected an int ≥ 1, got int 0"),
    "factor": (lambda: Alibi(3, -1.0), r"factor: expected a finite number > 0, got float -1.0"),
    "not called": (
        lambda: GroupedQueryAttention(D, N, K, position_bias="alibi", rngs=nnx.Rngs(0)),
        r"position_bias: expected what gives a bias, as Alibi does, got str 'alibi'",
    ),
    "other heads": (
        lambda: pair(Alibi(N + 1), None)[1](X),
        rf"bias: expected a shape that broadcasts to .*, got float32\[{N + 1}, 1, {T}\]",
    ),
    "a cache": (
        lambda: pair(Alibi(N), None)[1](X, cache=pair(None, None)[1].empty_cache(B, T)),
        r"cache: expected a module without position_bias",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_does_not_fit_is_refused(name):
    call, message = REFUSALS[name]
    with pytest.raises(ArgumentError, match=message):
        call()
