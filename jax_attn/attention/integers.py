"""Integers of any dtype made int32 without wrapping around."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn.attention import checks

# Farther than any position, and still safe to add in int32: what lies beyond is all alike.
FAR = 2**30
INT32 = np.iinfo(np.int32)


def clipped(x: Any, by: int = 0) -> Any:
    """x + by, clipped to [−FAR, FAR]: an int for an int, else an array in int32, maybe abstract.

    Exact for any integer dtype, and traced: nothing wraps around on the way.
    """
    if checks.is_int(x):
        return max(-FAR, min(FAR, int(x) + by))
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, np.int32)
    if not isinstance(x, jax.Array):
        sums = np.asarray(np.asarray(x).astype(object) + by, object)  # Python's know no end
        return np.asarray(sums.clip(-FAR, FAR), np.int32)
    if jnp.iinfo(x.dtype).bits < 32:
        x = x.astype(jnp.int32)
    known = jnp.iinfo(x.dtype)
    first, last = (max(known.min, min(known.max, end - by)) for end in (-FAR, FAR))
    # What is added may be more than int32 holds. Sums in int32 are right to a multiple of 2³², and
    # this one lies in its range.
    more = clipped(first, by) - first
    wrapped = np.int32((more - INT32.min) % 2**32 + INT32.min)
    return x.clip(x.dtype.type(first), x.dtype.type(last)).astype(jnp.int32) + wrapped


def beyond_int32(name: str, x: Any) -> list[str]:
    """What is wrong with an array of integers whose values are known and do not fit in int32."""
    if isinstance(x, jax.core.Tracer | jax.ShapeDtypeStruct) or _fits(x):
        return []
    values = np.asarray(x)
    beyond = values[(values < INT32.min) | (values > INT32.max)]
    return [f"{name}: expected integers within int32, got {beyond[0]}"] if beyond.size else []


def in_one_dtype(**arrays: Any) -> tuple[list[Any], list[str]]:
    """Arrays of integers, free of `beyond_int32`, in one dtype that tells them apart; problems.

    It is int32 unless traced arrays, whose values are not known, have a wider one. Abstract arrays
    are int32, as arrays are whose values are known.
    """
    given = [_narrowed(x) for x in arrays.values()]
    common = np.result_type(*(x.dtype for x in given))
    if common.kind not in "iu" or jax.dtypes.canonicalize_dtype(common) != common:
        got = " and ".join(map(checks.summary, given))
        return given, [f"{', '.join(arrays)}: expected one dtype, got {got}"]
    return [x if isinstance(x, jax.ShapeDtypeStruct) else x.astype(common) for x in given], []


def _narrowed(x: Any) -> Any:
    """x in int32 where that is known to hold it."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return clipped(x)
    if isinstance(x, jax.core.Tracer) and not _fits(x):
        return x
    return x.astype(jnp.int32) if isinstance(x, jax.Array) else np.asarray(x, np.int32)


def _fits(x: Any) -> bool:
    """Whether int32 holds all that x's dtype does."""
    if not checks.is_array(x):
        x = np.asarray(x)
    known = jnp.iinfo(x.dtype)
    return known.min >= INT32.min and known.max <= INT32.max
