"""Calls of attention on a mesh of 2 rows × 4 heads, and transforms around them."""

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import P

from helpers.attention.kernel_comparison import draws, in_tiles, rounding
from helpers.attention.meshes import mesh, placed
from jax_attn.attention import Dropout, Mask, dot_product_attention

B, T, S, N, H = 8, 13, 11, 8, 5
KERNELS = {"blocked": in_tiles(2, 5, 3), "dense": "dense", "the default": None}
ROWS_AND_HEADS = P("rows", None, "heads")


class Row(NamedTuple):
    """K: key/value heads. query, key, bias: how these lie on a mesh of 2 rows × 4 heads; bias: its
    shape, too. sums: whether gradients of what several devices have alike are summed. whole: the
    kinds of mesh in which gradients that were computed in parts must lie whole: in an Explicit one
    they have the type of their array; in an Auto one Shardy would cut them by a part of an axis."""

    K: int = N
    query: P = ROWS_AND_HEADS
    key: P = ROWS_AND_HEADS
    bias: tuple[tuple[int, ...], P] | None = None
    options: Mapping[str, Any] = MappingProxyType({})
    sums: bool = False
    whole: tuple[str, ...] = ()


def ids(length):
    return np.sort(np.random.default_rng(length).integers(0, 3, (B, length)), axis=1)


EXTRA_KEYS = dict(
    zip(("bias_k", "bias_v", "sinks"), draws((4, H), (4, H), (N,), dtype=np.float64), strict=True)
)
ROWS = {
    "batch": Row(query=P("rows"), key=P("rows")),
    "batch over both axes of the mesh": Row(query=P(("rows", "heads")), key=P(("rows", "heads"))),
    "heads": Row(query=P(None, None, "heads"), key=P(None, None, "heads")),
    "both": Row(),
    "both, keys everywhere": Row(key=P(), whole=("explicit",)),
    "grouped": Row(K=4),
    "one key/value head": Row(K=1, key=P("rows"), sums=True),
    "fewer key/value heads than devices": Row(K=2, key=P("rows"), sums=True, whole=("auto",)),
    "a bias of all": Row(bias=((1, N, T, S), P(None, "heads")), sums=True),
    "a bias of all heads and rows": Row(bias=((T, S), P()), sums=True),
    "a bias cut with the rest": Row(bias=((B, N, T, S), P("rows", "heads"))),
    "lengths": Row(options={"mask": Mask.lengths(np.array([11, 4, 1, 7, 2, 9, 11, 3]))}),
    "a window": Row(options={"mask": Mask.window(3, 2)}),
    "bands by row": Row(options={"mask": Mask.causal(np.array([0, 2, -1, 5, 1, 1, -3, 0]))}),
    "segments": Row(options={"mask": Mask.segments(ids(T), ids(S))}),
    "booleans": Row(options={"mask": Mask.array(draws((B, 1, T, S))[0] < 0.5)}),
    "dropout": Row(K=4, options={"dropout": Dropout(0.3, key=jax.random.key(5))}),
    "dropout handed in": Row(options={"dropout": Dropout(0.3, keep=draws((1, N, T, S))[0] < 0.5)}),
    "a learned key, a zero and sinks": Row(K=4, options=EXTRA_KEYS | {"add_zero_attn": True}),
    "a softcap in causal order": Row(options={"is_causal": True, "softcap": 2.0}),
}


def both_passes(kernel, options, cotangent, *arrays):
    def attend(q, k, v, *bias):
        given = {"bias": bias[0]} if bias else {}
        return dot_product_attention(q, k, v, implementation=kernel, **given, **options)

    out, pull = jax.vjp(attend, *arrays)
    return out, *pull(cotangent)


def by_blocked(q, k, v):
    return dot_product_attention(q, k, v, implementation=KERNELS["blocked"])


def operands(row):
    """(cotangent, query, key, value[, bias]) and how they are cut."""
    q, k, v, cotangent = draws(
        (B, T, N, H), (B, S, row.K, H), (B, S, row.K, H), (B, T, N, H), dtype=np.float64
    )
    arrays, specs = [cotangent, q, k, v], [row.query, row.query, row.key, row.key]
    if row.bias is not None:
        arrays += draws(row.bias[0], dtype=np.float64, seed=1)
        specs.append(row.bias[1])
    return arrays, specs


def assert_equal(arrays, found, wanted):
    cotangent, q, k, v, *_ = arrays
    for got, want in zip(found, wanted, strict=True):
        assert np.abs(np.asarray(got) - want).max() <= rounding((q, k, v, cotangent), want)


def as_it_is(attend, *arrays):
    return attend(*arrays)


def in_a_vmap(attend, *arrays):
    q, k, v = arrays
    return jax.vmap(attend, in_axes=(0, None, 0))(jnp.stack([q, 2 * q]), k, jnp.stack([v, v]))[1]


def in_a_vmap_over_the_batch(attend, *arrays):
    """Over an axis that the mesh cuts."""
    return jax.vmap(attend)(*(x[:, None] for x in arrays))[:, 0]


def in_a_vmap_of_a_vmap(attend, *arrays):
    q, k, v = (x[None, :, None] for x in arrays)
    inner = jax.vmap(attend, in_axes=1, out_axes=1)
    return jax.vmap(inner)(q, k, v)[0, :, 0]


def rematerialized(attend, *arrays):
    return jax.checkpoint(attend)(*arrays)


def in_a_scan(attend, *arrays):
    q, *kv = arrays
    return jax.lax.scan(lambda q, _: (attend(q, *kv), None), q, length=2)[0]


def passes_under(transform: Callable[..., Any]) -> Callable[..., Any]:
    """Both passes of a grouped call in a window, under a transform."""

    def run(cotangent, *arrays):
        def attend(q, k, v):
            return dot_product_attention(
                q, k, v, implementation=KERNELS["blocked"], mask=Mask.window(3, 2)
            )

        out, pull = jax.vjp(lambda *arrays: transform(attend, *arrays), *arrays)
        return out, *pull(cotangent)

    return run


@functools.cache
def passes_on_one_device(transform: Callable[..., Any]) -> tuple[Any, ...]:
    return jax.jit(passes_under(transform))(*operands(ROWS["grouped"])[0])


def assert_equal_under(
    transform: Callable[..., Any], kind: str, *, is_compiled: bool = True
) -> None:
    """Both passes of a grouped call in a window are those of one device."""
    run = passes_under(transform)
    with jax.enable_x64(True):
        arrays, specs = operands(ROWS["grouped"])
        there = placed(mesh(kind, rows=2, heads=4), arrays, specs)
        found = (jax.jit(run) if is_compiled else run)(*there)
        assert_equal(arrays, found, passes_on_one_device(transform))
