"""The values of a port: not finite, or not held by another dtype. Needs no framework."""

from collections.abc import Iterator, Mapping
from typing import Any

import ml_dtypes  # noqa: F401  registers bfloat16 with NumPy
import numpy as np

from jax_attn.transfer.arrays import Spec, read
from jax_attn.transfer.problems import Problem

FLOATS = ("float16", "bfloat16", "float32", "float64")
_CHUNK = 2**22
"""How many values are looked at at once."""


def bad_values(
    tensors: Mapping[str, Any],
    key: str,
    spec: Spec,
    dtype: str | None,
    *,
    lossy: bool,
    allow_nonfinite: bool,
) -> Iterator[Problem]:
    """Values of a tensor that are not finite, and those that `dtype` does not hold.

    dtype: what floating numbers are cast to; None for no cast. lossy: whether values may change.
    """
    if spec.dtype not in FLOATS:
        return
    to = dtype if dtype not in (None, spec.dtype) and not lossy else None
    nans = infinite = changed = overflown = 0
    flat = read(tensors, key).reshape(-1)
    for start in range(0, flat.size, _CHUNK):
        part = flat[start : start + _CHUNK]
        finite = np.isfinite(part)
        nans += int(np.isnan(part).sum())
        infinite += int(np.isinf(part).sum())
        if to is not None:
            cast = recast(part, to)
            changed += int((finite & (recast(cast, spec.dtype) != part)).sum())
            overflown += int((finite & ~np.isfinite(cast)).sum())
    if (nans or infinite) and not allow_nonfinite:
        text = f"expected finite numbers, got {nans} NaN and {infinite} infinite of {flat.size}"
        yield Problem("not finite", key, text, "--allow-nonfinite carries them as they are")
    if changed:
        text = f"expected {to} to hold its {spec.dtype} numbers, {changed} of {flat.size} change"
        text += f", {overflown} of them to infinity" if overflown else ""
        yield Problem("wrong dtype", key, text, "--lossy rounds them")


def recast(array: np.ndarray, dtype: str) -> np.ndarray:
    """Floating numbers in another dtype, overflowing to infinity; other arrays as they are."""
    if array.dtype.name not in FLOATS:
        return array
    with np.errstate(over="ignore", invalid="ignore"):
        return array.astype(dtype, copy=False)
