"""Checks of arguments: all problems are collected, then raised in one error."""

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn.dtypes import DTYPES

HOW_TO_ENABLE_X64 = (
    'float64 needs x64, which JAX has off: jax.config.update("jax_enable_x64", True), or set '
    "JAX_ENABLE_X64=1 before jax starts (without it JAX narrows to float32 silently)"
)


class ArgumentError(ValueError, TypeError):
    """Invalid arguments of a call; the message lists every problem.

    Both a ValueError and a TypeError, since one call can hold both kinds of mistake.
    """


def raise_all(where: str, problems: list[str]) -> None:
    """Raise one ArgumentError that lists every problem; return if there is none."""
    if len(problems) == 1:
        raise ArgumentError(f"{where}: {problems[0]}")
    if problems:
        lines = "".join(f"\n  - {problem}" for problem in problems)
        raise ArgumentError(f"{where}: {len(problems)} problems:{lines}")


def holding(reasons: Mapping[str, object]) -> list[str]:
    """Return the reasons whose condition holds."""
    return [reason for reason, holds in reasons.items() if holds]


def is_array(x: object) -> bool:
    """Return whether x has a shape and a dtype: NumPy, JAX, traced or abstract."""
    return hasattr(x, "shape") and hasattr(x, "dtype")


def is_integer_array(x: Any) -> bool:
    """Return whether x is an array of an integer dtype of NumPy or JAX; torch tensors are not."""
    try:
        return is_array(x) and bool(jnp.issubdtype(x.dtype, jnp.integer))
    except TypeError:
        return False


def is_int(x: object) -> bool:
    """Return whether x is a plain integer; True and False are not."""
    return isinstance(x, (int, np.integer)) and not isinstance(x, bool)


def is_count(x: Any) -> bool:
    """Return whether x is a plain integer ≥ 1."""
    return is_int(x) and x > 0


def count_problems(**counts: object) -> list[str]:
    """List which of the named counts are not plain integers ≥ 1."""
    return [
        f"{name}: expected an int ≥ 1, got {summary(n)}"
        for name, n in counts.items()
        if not is_count(n)
    ]


def is_real(x: Any) -> bool:
    """Return whether x is a finite plain number."""
    try:
        return (is_int(x) or isinstance(x, (float, np.floating))) and math.isfinite(x)
    except OverflowError:  # an int larger than any float
        return False


def is_causal_problems(is_causal: Any) -> list[str]:
    """Say why is_causal is not a bool whose value is known while tracing."""
    if isinstance(is_causal, (bool, np.bool_)):
        return []
    got = summary(is_causal)
    if isinstance(is_causal, jax.core.Tracer):
        got = "a traced value: name it in jit's static_argnames, or close over it"
    return [f"is_causal: expected a static Python bool, got {got}"]


def rate_problems(**rates: Any) -> list[str]:
    """List which of the named rates are not plain numbers in [0, 1]."""
    return [
        f"{name}: expected a number in [0, 1], got {rate!r}"
        for name, rate in rates.items()
        if not (is_real(rate) and 0 <= rate <= 1)
    ]


def summary(x: Any) -> str:
    """Return 'float32[2, 5]' for an array; type and value for anything else."""
    if is_array(x):
        return f"{x.dtype}{list(x.shape)}"
    return f"{type(x).__name__} {x!r}"


def dtype_problems(name: str, dtype: Any) -> list[str]:
    """Say why dtype is not a supported floating-point dtype."""
    try:
        spelling = np.dtype(dtype).name
    except TypeError:
        spelling = repr(dtype)
    if spelling not in DTYPES:
        return [f"{name}: expected {', '.join(DTYPES)}, got dtype {spelling}"]
    # jax sets its options as attributes only at import, so mypy does not know them.
    if spelling == "float64" and not jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        return [f"{name}: {HOW_TO_ENABLE_X64}"]
    return []


def float_problems(name: str, x: Any, rank: int | None = None, axes: str = "") -> list[str]:
    """Say why x is not a floating-point array, of this rank if one is given."""
    if not is_array(x):
        return [f"{name}: expected a NumPy or JAX array, got {type(x).__name__}"]
    problems = dtype_problems(name, x.dtype)
    if rank is not None and len(x.shape) != rank:
        problems.append(f"{name}: expected rank {rank} {axes}, got {summary(x)}")
    return problems


def bias_problems(bias: Any) -> list[str]:
    """Say why bias is not an array of floats that can be added to the scores."""
    if bias is None:
        return []
    if is_array(bias) and str(bias.dtype) == "bool":
        return [f"bias: expected floats to add to the scores, got {summary(bias)}: a mask"]
    return float_problems("bias", bias)


def precision_problems(precision: Any) -> list[str]:
    """Say why precision is not one that jax.lax accepts."""
    try:
        if precision is None or _is_precision(precision):
            return []
    except TypeError:  # not hashable
        pass
    return [f"precision: expected None or one that jax.lax takes, got {summary(precision)}"]


@functools.cache
def _is_precision(precision: Any) -> bool:
    x = jax.ShapeDtypeStruct((1, 1), np.float32)
    try:
        jax.eval_shape(lambda x: jax.lax.dot(x, x, precision=precision), x)
    except (TypeError, ValueError):
        return False
    return True


def key_problems(key: Any) -> list[str]:
    """Say why key is not one key of jax.random, new-style or raw uint32."""
    try:
        if is_array(key) and str(key.dtype) == "uint32":
            key = jax.random.wrap_key_data(key)
        if is_array(key) and key.shape == () and jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
            return []
    except TypeError:  # not key data, or a torch dtype
        pass
    return [f"key: expected one jax.random.key(...), got {summary(key)}"]


def boolean_problems(name: str, x: Any) -> list[str]:
    """Say why x is not a boolean array over (B, N, T, S)."""
    if not is_array(x):
        return [f"{name}: expected a boolean array, got {type(x).__name__}"]
    problems = []
    if str(x.dtype) != "bool":
        problems.append(
            f"{name}: expected boolean, True = attend, got {summary(x)}; an additive mask is "
            "bias=, one of 0 and 1 is Mask.from_zero_one(...)"
        )
    if len(x.shape) == 3:
        a, b, c = x.shape
        problems.append(
            f"{name}: expected rank 2 (T, S) or 4 (B, N, T, S), got {summary(x)}, which reads "
            f"both as (B, T, S) and as (N, T, S): make it [:, None], ({a}, 1, {b}, {c}), or "
            f"[None], (1, {a}, {b}, {c})"
        )
    elif len(x.shape) not in (2, 4):
        problems.append(f"{name}: expected rank 2 (T, S) or 4 (B, N, T, S), got {summary(x)}")
    return problems


def broadcast_problems(name: str, x: Any, target: tuple[int, ...], axes: str) -> list[str]:
    """Say why x does not broadcast to the shape target, whose axes are named by `axes`."""
    pairs = zip(reversed(x.shape), reversed(target), strict=False)
    if len(x.shape) <= len(target) and all(size in (1, want) for size, want in pairs):
        return []
    return [f"{name}: expected a shape that broadcasts to {axes} = {target}, got {summary(x)}"]


def number_problems(scale: object, softcap: Any) -> list[str]:
    """Say what is wrong with scale and softcap."""
    problems = []
    if not (scale is None or is_real(scale)):
        problems.append(
            f"scale: expected a finite plain number or None, got {summary(scale)}; a "
            "learned scale multiplies the query"
        )
    if not (softcap is None or (is_real(softcap) and softcap > 0)):
        got = summary(softcap)
        problems.append(f"softcap: expected a finite plain number > 0 or None, got {got}")
    return problems
