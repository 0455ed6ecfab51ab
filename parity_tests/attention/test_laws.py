"""The laws of attention hold for the kernels that run on a CPU; each sees what breaks it."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from hypothesis import given

from helpers import laws
from helpers.attention import attention_definition as definition
from helpers.attention.kernel_comparison import in_tiles
from helpers.laws import CHUNKS, DRAWN, HV, LAWS, Draw, G, H, K, N, S, Side, T, everything, excess
from jax_attn.attention import attend_with_cache, dot_product_attention
from jax_attn.attention.dispatch import Kernel
from jax_attn.nn import KVCache

# --- who is asked -----------------------------------------------------------------------------


@functools.cache
def compiled(kernel: str | Kernel, causal: bool):
    @jax.jit
    def run(q, k, v, allowed, bias):
        options = {"mask": allowed, "bias": bias, "is_causal": causal, "implementation": kernel}
        return dot_product_attention(q, k, v, **options)

    return run


def by_kernel(kernel: str | Kernel) -> Side:
    def attend(q, k, v, *, allowed=None, bias=None, causal=False):
        all_keys, nothing = everything(q, k)
        allowed = all_keys if allowed is None else allowed
        bias = nothing if bias is None else bias
        return np.asarray(compiled(kernel, causal)(q, k, v, allowed, bias))

    return Side(attend, cached)


def cached(q, k, v):
    cache = KVCache.empty(
        q.shape[0], length=S, num_kv_heads=K, head_dim=H, value_dim=HV, dtype="float32"
    )
    outs, start = [], 0
    for size in CHUNKS:
        out, cache = attend_with_cache(*(x[:, start : start + size] for x in (q, k, v)), cache)
        outs.append(np.asarray(out))
        start += size
    return np.concatenate(outs, axis=1)


def defined(q, k, v, *, allowed=None, bias=None, causal=False):
    if causal:
        allowed = laws.causal(q, k)
    return definition.attend(q, k, v, allowed=allowed, bias=bias)[0]


def defined_in_chunks(q, k, v, *, seen=lambda start: start):
    """seen: how many earlier tokens the mask of a chunk counts that starts there."""
    outs, start = [], 0
    for size in CHUNKS:
        chunk, stop = q[:, start : start + size], start + size
        allowed = np.tril(np.ones((size, stop), bool), seen(start))
        outs.append(defined(chunk, k[:, :stop], v[:, :stop], allowed=allowed))
        start = stop
    return np.concatenate(outs, axis=1)


DEFINITION = Side(defined, defined_in_chunks)
SIDES = {
    "the definition": DEFINITION,
    "dense": by_kernel("dense"),
    # In tiles that divide no axis.
    "blocked": by_kernel(in_tiles(K=1, T=2, S=3)),
}


@pytest.mark.slow
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("law", LAWS)
@given(**DRAWN)
def test_law(side, law, seed, size):
    assert excess(*LAWS[law](SIDES[side], Draw(seed, size))) <= 1


# --- each law sees what breaks it -------------------------------------------------------------


def softmax_plus_one(q, k, v, *, bias=None, **options):
    """One key more, of score 0, that has nothing to say."""
    bias = everything(q, k)[1] if bias is None else bias
    allowed = options.pop("allowed", None)
    allowed = everything(q, k)[0] if allowed is None else allowed
    one_more = {
        "bias": np.pad(bias, [(0, 0)] * 3 + [(0, 1)]),
        "allowed": np.pad(allowed, [(0, 0)] * 3 + [(0, 1)], constant_values=True),
    }
    pad = [(0, 0), (0, 1), (0, 0), (0, 0)]
    return defined(q, np.pad(k, pad), np.pad(v, pad), **one_more)


def places_counted(q, k, v, *, bias=None, **options):
    bias = everything(q, k)[1] if bias is None else bias
    return defined(q, k, v, bias=bias + 0.01 * np.arange(k.shape[1]), **options)


def mask_of_minus_ten(q, k, v, *, allowed=None, bias=None):
    all_keys, nothing = everything(q, k)
    hidden = ~(all_keys if allowed is None else allowed)
    return defined(q, k, v, bias=(nothing if bias is None else bias) - 10 * hidden)


def tiled(q, k, v, **options):
    """Query head n reads key/value head n % K."""
    heads = k.shape[2]
    order = np.arange(N).reshape(-1, heads).T.ravel()
    back = np.argsort(order)
    options = {name: x if x is None else x[:, order] for name, x in options.items()}
    return defined(q[:, :, order], k, v, **options)[:, :, back]


def causal_and_one(q, k, v, *, causal):
    assert causal
    return defined(q, k, v, allowed=np.tril(everything(q, k)[0], 1))


class OtherOrderEachTime:
    """Sums the keys from the left, then from the right."""

    def __init__(self):
        self.step = 1

    def __call__(self, q, k, v, **options):
        self.step = -self.step
        turned = {name: x[..., :: self.step] for name, x in options.items()}
        keys = k[:, :: self.step], v[:, :: self.step]
        return SIDES["dense"].attend(q, *map(np.ascontiguousarray, keys), **turned)


# law -> a side that breaks it.
BROKEN = {
    "logit shift": Side(softmax_plus_one),
    "key permutation": Side(places_counted),
    "batch equivariance": Side(lambda q, k, v, **o: defined(q, k[[0, 0]], v, **o)),
    "head equivariance": Side(tiled),
    "mask is deletion": Side(mask_of_minus_ten),
    # Scores that grow with the number of keys.
    "duplicated key": Side(lambda q, k, v, **o: defined(q * np.log(k.shape[1]), k, v, **o)),
    "linear in value": Side(lambda q, k, v, **o: defined(q, k, np.clip(v, -2, 2), **o)),
    "causal prefix": Side(causal_and_one),
    # The mask of every chunk from the top left corner.
    "cache is full pass": dataclasses.replace(
        DEFINITION, cached=functools.partial(defined_in_chunks, seen=lambda start: 0)
    ),
    "grouped is repeated": Side(tiled),
    "same bits again": Side(OtherOrderEachTime()),
}


@pytest.mark.parametrize("law", LAWS)
def test_the_law_sees_what_breaks_it(law):
    assert excess(*LAWS[law](BROKEN[law], Draw(3))) > 10


def test_what_is_planted_is_right_but_for_its_mistake():
    """No cause but the planted one: the tiled heads of multi-head attention are right."""
    q, k, v = Draw(3).arrays(kv_heads=N)
    assert np.array_equal(tiled(q, k, v), defined(q, k, v))
    assert G > 1
    assert T < S
