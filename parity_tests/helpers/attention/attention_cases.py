"""Calls of attention, as named rows, and the kernels that each test runs them by."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_attn import attention
from jax_attn.attention import Dropout, Mask

B, T, S, N, K, H, HV = 2, 5, 7, 6, 3, 11, 13
DTYPES = ("float16", "bfloat16", "float32", "float64")

INSISTED = {}


def dot_product_attention(*arguments, **options):
    return attention.dot_product_attention(*arguments, **INSISTED, **options)


by_each_kernel = pytest.mark.usefixtures("kernel")
# For what a kernel has no part in, and for whether a check sees what is wrong.
one_kernel = pytest.mark.parametrize("kernel", ["dense"], indirect=True)


def draw(seed, dtype="float32", kv_heads=K):
    """query, key, value and a cotangent, all of them exact in dtype."""
    rng = np.random.default_rng(seed)
    shapes = (B, T, N, H), (B, S, kv_heads, H), (B, S, kv_heads, HV), (B, T, N, HV)
    return tuple(rng.standard_normal(shape).astype(jnp.dtype(dtype)) for shape in shapes)


RNG = np.random.default_rng(20)
ARRAY_TS = RNG.random((T, S)) < 0.6
ARRAY_BNTS = RNG.random((B, N, T, S)) < 0.6
ARRAY_B11S = RNG.random((B, 1, 1, S)) < 0.7
BIAS_NTS = RNG.standard_normal((N, T, S)).astype(np.float32)
BIAS_HOLES = np.where(RNG.random((B, 1, T, S)) < 0.5, -np.inf, 0.25).astype(np.float32)
BIAS_HOLES[1, 0, 3] = -np.inf
KEEP = RNG.random((B, N, T, S)) < 0.8
rows, cols = np.arange(T)[:, None], np.arange(S)[None, :]
OFFSETS, LENGTHS = np.array([-1, 3]), np.array([4, 6])
Q_SEGMENTS = np.array([[0, 0, 1, 1, 2], [1, 1, 0, 2, 2]])
KV_SEGMENTS = np.array([[0, 1, 1, 2, 2, 2, 0], [2, 2, 2, 2, 1, 1, 1]])


def per_row(x):
    return np.asarray(x).reshape(B, 1, 1, 1)


# name: what the function is told; what the definition is told.
CASES = {
    "plain": ({}, {}),
    "scale": ({"scale": 0.77}, {"scale": 0.77}),
    "softcap": ({"softcap": 0.9}, {"softcap": 0.9}),
    "causal": ({"is_causal": True}, {"allowed": cols <= rows}),
    "causal at the bottom right": ({"mask": Mask.causal(S - T)}, {"allowed": cols <= rows + S - T}),
    "causal, row by row": (
        {"mask": Mask.causal(OFFSETS)},
        {"allowed": cols <= rows + per_row(OFFSETS)},
    ),
    "window": ({"mask": Mask.window(2, 1)}, {"allowed": (rows - 2 <= cols) & (cols <= rows + 1)}),
    "window open to the right": ({"mask": Mask.window(1, None, 2)}, {"allowed": rows + 1 <= cols}),
    "lengths": ({"mask": Mask.lengths(LENGTHS)}, {"allowed": cols < per_row(LENGTHS)}),
    "segments": (
        {"mask": Mask.segments(Q_SEGMENTS, KV_SEGMENTS)},
        {"allowed": Q_SEGMENTS[:, None, :, None] == KV_SEGMENTS[:, None, None, :]},
    ),
    "array (T, S)": ({"mask": ARRAY_TS}, {"allowed": ARRAY_TS}),
    "array per head": ({"mask": ARRAY_BNTS}, {"allowed": ARRAY_BNTS}),
    "array per key": ({"mask": ARRAY_B11S}, {"allowed": ARRAY_B11S}),
    "bias (N, T, S)": ({"bias": BIAS_NTS}, {"bias": BIAS_NTS}),
    "bias of -inf": ({"bias": BIAS_HOLES}, {"bias": BIAS_HOLES}),
    "empty rows": (
        {"mask": Mask.causal(-2)},
        {"allowed": cols <= rows - 2},
    ),
    "rows emptied by mask and bias together": (
        {"mask": np.isinf(BIAS_HOLES) | ARRAY_TS, "bias": BIAS_HOLES},
        {"allowed": np.isinf(BIAS_HOLES) | ARRAY_TS, "bias": BIAS_HOLES},
    ),
    "dropout": ({"dropout": Dropout(0.2, keep=KEEP)}, {"keep": KEEP, "rate": 0.2}),
    "all at once": (
        {
            "mask": Mask.lengths(LENGTHS) & Mask.array(ARRAY_BNTS),
            "is_causal": True,
            "bias": BIAS_NTS,
            "scale": 0.5,
            "softcap": 1.5,
            "dropout": Dropout(0.2, keep=KEEP),
        },
        {
            "allowed": (cols < per_row(LENGTHS)) & ARRAY_BNTS & (cols <= rows),
            "bias": BIAS_NTS,
            "scale": 0.5,
            "softcap": 1.5,
            "keep": KEEP,
            "rate": 0.2,
        },
    ),
}


def value_and_gradients(cotangent, *arrays, **options):
    """The output, and the gradients of q, k, v and of a bias added to the scores."""
    zeros = jnp.zeros((B, N, T, S), jnp.float64 if arrays[0].dtype == "float64" else jnp.float32)
    bias = options.pop("bias", None)

    def call(q, k, v, extra):
        added = extra if bias is None else extra + jnp.asarray(bias).astype(extra.dtype)
        return dot_product_attention(q, k, v, bias=added, **options)

    out, backward = jax.vjp(call, *map(jnp.asarray, arrays), zeros)
    return out, *backward(jnp.asarray(cotangent))
