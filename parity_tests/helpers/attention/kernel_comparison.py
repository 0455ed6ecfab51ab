"""Two kernels on the same arrays, in float64, and what rounding lets them differ by."""

import dataclasses
import functools
import math

import jax
import numpy as np

from jax_attn.attention import dispatch, dot_product_attention
from jax_attn.attention.kernels.tile import Tiles


def value_and_gradients(implementation, q, k, v, cotangent, bias=None, **options):
    def attend(*arrays):
        q, k, v, bias = arrays
        return dot_product_attention(q, k, v, bias=bias, implementation=implementation, **options)

    @jax.jit
    def run(cotangent, *arrays):
        out, pull = jax.vjp(attend, *arrays)
        return out, *(g for g in pull(cotangent) if g is not None)

    return run(cotangent, q, k, v, bias)


def in_tiles(K: int, T: int, S: int) -> dispatch.Kernel:
    """The blocked kernel, insisted on with tiles of these sizes."""
    blocked = dispatch.KERNELS["blocked"]
    tiles = Tiles(K, T, S)
    return dataclasses.replace(blocked, run=functools.partial(blocked.run, tiles=tiles))


def rounding(arrays, wanted) -> float:
    """What two orders of the same sums may differ by, relative to the largest number.

    No sum has more terms than the axes have elements; scores pass through an exponential, which
    makes an error of theirs, at most √H·max|q|·max|k| units, a relative one.
    """
    q, k, v, _ = arrays
    steepness = 1 + math.sqrt(q.shape[-1]) * np.abs(q).max() * np.abs(k).max()
    terms = sum(q.shape) + k.shape[1] + v.shape[-1]
    return terms * steepness * 2.0**-53 * max(1.0, float(np.abs(wanted).max()))


def draws(*shapes, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def example(T=7, S=11, dtype=np.float64):
    return draws((2, T, 6, 5), (2, S, 3, 5), (2, S, 3, 5), (2, T, 6, 5), dtype=dtype)
