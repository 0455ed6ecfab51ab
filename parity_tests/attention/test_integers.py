"""Integers of every dtype, known and traced, become int32 without wrapping around."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_attn.attention import Mask
from jax_attn.attention.integers import FAR, clipped

pytestmark = pytest.mark.filterwarnings("error")

EDGES = [0, FAR, 2**31, 2**32, 2**63, 2**64]
VALUES = sorted({sign * edge + by for sign in (1, -1) for edge in EDGES for by in (-1, 0, 1)})
DTYPES = ("int8", "uint8", "int16", "int32", "uint32", "int64", "uint64")


def held(dtype):
    known = np.iinfo(dtype)
    return [n for n in VALUES if known.min <= n <= known.max]


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_are_clipped_as_python_s_would_be(dtype):
    values = held(dtype)
    with jax.enable_x64(True):
        arrays = np.array(values, dtype), jnp.array(values, dtype)
        for by in (0, -1, FAR, -FAR, 2**31, 2**32 + 1, -(2**40), 2**64):
            want = [max(-FAR, min(FAR, n + by)) for n in values]
            for x in arrays:
                got = clipped(x, by)
                assert got.dtype == np.int32
                assert got.tolist() == want, by
            assert [clipped(n, by) for n in values] == want
            assert clipped(arrays[0][-1:].reshape(()), by).tolist() == want[-1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_traced_lengths_hide_nothing_that_they_hold(dtype):
    lengths = np.array([np.iinfo(dtype).max, 3], dtype)
    with jax.enable_x64(lengths.itemsize == 8):  # without it JAX narrows before a mask is made
        visible = jax.jit(lambda lengths: Mask.lengths(lengths).materialize(2, 5))(lengths)
    assert np.asarray(visible)[:, 0, 0].sum(axis=1).tolist() == [5, 3]


@pytest.mark.parametrize("dtype", ["int8", "int32", "uint32", "int64", "uint64"])
def test_traced_segments_that_differ_stay_apart(dtype):
    """Also those of which int32 would make one."""
    most = np.iinfo(dtype).max
    q = np.array([[1, 2, most]], dtype)
    kv = np.array([[most, 1 + min(2**32, most - 1), 2]], dtype)
    with jax.enable_x64(q.itemsize == 8):
        visible = jax.jit(lambda q, kv: Mask.segments(q, kv).materialize(3, 3))(q, kv)
    assert np.array_equal(visible[0, 0], q[0][:, None] == kv[0][None])
    assert visible.sum() == (2 if most > 2**32 else 3)
