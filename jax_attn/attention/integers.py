"""Conversion of integers of any dtype to int32 without wrapping around."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn.attention import checks

# Farther than any position, and still safe to add in int32; larger values need no distinction.
FAR = 2**30
INT32 = np.iinfo(np.int32)


def clipped(x: Any, by: int = 0) -> Any:
    """Return x + by clipped to [−FAR, FAR]: an int for an int, else an int32 array, maybe abstract.

    Exact for any integer dtype, also traced: no intermediate result wraps around.
    """
    if checks.is_int(x):
        return max(-FAR, min(FAR, int(x) + by))
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, np.int32)
    if not isinstance(x, jax.Array):
        sums = np.asarray(np.asarray(x).astype(object) + by, object)  # unbounded
        return np.asarray(sums.clip(-FAR, FAR), np.int32)
    if jnp.iinfo(x.dtype).bits < 32:
        x = x.astype(jnp.int32)
    known = jnp.iinfo(x.dtype)
    first, last = (max(known.min, min(known.max, end - by)) for end in (-FAR, FAR))
    # `more` may exceed int32. Sums in int32 are right modulo 2³², and this one lies in its range.
    more = clipped(first, by) - first
    wrapped = np.int32((more - INT32.min) % 2**32 + INT32.min)
    return x.clip(x.dtype.type(first), x.dtype.type(last)).astype(jnp.int32) + wrapped


def beyond_int32(name: str, x: Any) -> list[str]:
    """Say which value of an integer array does not fit in int32, if the values are known."""
    if isinstance(x, jax.core.Tracer | jax.ShapeDtypeStruct) or _fits(x):
        return []
    values = np.asarray(x)
    beyond = values[(values < INT32.min) | (values > INT32.max)]
    return [f"{name}: expected integers within int32, got {beyond[0]}"] if beyond.size else []


def in_one_dtype(**arrays: Any) -> tuple[list[Any], list[str]]:
    """Return integer arrays in one common dtype that keeps them distinct, and the problems.

    The arrays have no `beyond_int32`. The dtype is int32 unless a traced array, whose values are
    unknown, has a wider one. Abstract arrays count as arrays with known values: int32.
    """
    given = [_narrowed(x) for x in arrays.values()]
    common = np.result_type(*(x.dtype for x in given))
    if common.kind not in "iu" or jax.dtypes.canonicalize_dtype(common) != common:
        got = " and ".join(map(checks.summary, given))
        return given, [f"{', '.join(arrays)}: expected one dtype, got {got}"]
    return [x if isinstance(x, jax.ShapeDtypeStruct) else x.astype(common) for x in given], []


def _narrowed(x: Any) -> Any:
    """Return x in int32 if int32 is known to hold it, else x."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return clipped(x)
    if isinstance(x, jax.core.Tracer) and not _fits(x):
        return x
    return x.astype(jnp.int32) if isinstance(x, jax.Array) else np.asarray(x, np.int32)


def _fits(x: Any) -> bool:
    """Return whether int32 holds every value of x's dtype."""
    if not checks.is_array(x):
        x = np.asarray(x)
    known = jnp.iinfo(x.dtype)
    return known.min >= INT32.min and known.max <= INT32.max
