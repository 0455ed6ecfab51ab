"""Rotary positions: pairs of a head's features rotated by an angle that grows with the position.
The score of a query at position i and a key at position j depends only on j − i. Pair m of `dim`
features rotates by base^(−2m/dim) radians per position (Su et al., "RoFormer", 2021); the scalings
change these frequencies for texts longer than those of the training.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jax_attn.attention import checks, integers, meshes
from jax_attn.attention.annotations import AnyArray
from jax_attn.attention.broadcasting import broadcasting

Length = int | AnyArray
# Radians per position (dim/2,), and the factor that multiplies both features of a pair.
Frequencies = tuple[AnyArray, float]


@broadcasting
def rotate(
    x: Float[AnyArray, "B T N H"],
    positions: Int[AnyArray, "#B T"] | Int[AnyArray, " T"] | None,
    rotary: "Rotary",
    *,
    length: int | Int[AnyArray, ""] | None = None,
) -> Float[Array, "B T N H"]:
    """Rotate the feature pairs of x, each by its position.

    Angles, their cosines and sines, and the products with x are in float32, or float64 for float64;
    the result is rounded once, to x's dtype. (transformers rounds cosine, sine and each product to
    x's dtype; in float32 the two agree.)

    Args:
      x: (B, T, N, H) in float16, bfloat16, float32 or float64: heads of queries or of keys.
      positions: integers (T,) or (B, T); 0 … T−1 if None.
      rotary: a Rotary.
      length: the length of the text, for DynamicNTK; the largest position + 1 unless given.
        Queries and keys of one attention need the same.

    Returns:
      (B, T, N, H) in x's dtype. Features beyond rotary.dim are unchanged.

    Raises:
      ArgumentError: lists every problem with the arguments.
    """
    problems = checks.float_problems("x", x, 4, "(B, T, N, H)")
    if not isinstance(rotary, Rotary):
        problems.append(f"rotary: expected a Rotary, got {checks.summary(rotary)}")
    elif not problems:
        problems += rotary.problems(x.shape[3])
    if not problems:
        problems += position_problems("positions", positions, *x.shape[:2])
    if not (length is None or _is_length(length)):
        got = checks.summary(length)
        problems.append(f"length: expected an int ≥ 1, or an integer array (), got {got}")
    checks.raise_all("rotate", problems)

    x = meshes.whole(jnp.asarray(x), 3)  # a pair's features may lie far apart
    dtype = np.dtype(np.float64 if x.dtype == jnp.float64 else np.float32)
    at = jnp.arange(x.shape[1]) if positions is None else jnp.asarray(positions)
    dim = x.shape[3] if rotary.dim is None else rotary.dim
    length = integers.clipped(at.max(initial=0), 1) if length is None else length
    frequencies_M, growth = rotary.frequencies(dim, dtype, length)
    angles_BT1M = (at[..., None].astype(dtype) * frequencies_M)[..., None, :]
    cos, sin = jnp.cos(angles_BT1M) * growth, jnp.sin(angles_BT1M) * growth

    # A pair (a, b) turns to (a·cos − b·sin, b·cos + a·sin): to itself · cos + its reverse · ∓sin.
    axis, pairs, signs = -2, (2, dim // 2), np.array([[-1], [1]], dtype)
    if rotary.interleaved:
        axis, pairs, signs = -1, (dim // 2, 2), np.array([-1, 1], dtype)
    cos, sin = jnp.expand_dims(cos, axis), jnp.expand_dims(sin, axis) * signs
    turning = x[..., :dim].astype(dtype).reshape(*x.shape[:3], *pairs)
    turned = turning * cos + jnp.flip(turning, axis) * sin
    turned = turned.reshape(*x.shape[:3], dim).astype(x.dtype)
    return jnp.concatenate([turned, x[..., dim:]], axis=-1)


def position_problems(name: str, positions: Any, B: int, T: int) -> list[str]:
    """Say what is wrong with positions for T steps in each of B rows."""
    if positions is None:
        return []
    got = checks.summary(positions)
    if not checks.is_integer_array(positions):
        return [f"{name}: expected an array of integers, got {got}"]
    if positions.shape not in ((T,), (B, T)):
        return [f"{name}: expected ({T},) or ({B}, {T}), one for each step, got {got}"]
    return integers.beyond_int32(name, positions)


@dataclasses.dataclass(frozen=True)
class _Settings:
    """Base class that raises one ArgumentError with every problem of its fields."""

    def __post_init__(self) -> None:
        values = vars(self)
        problems = [
            f"{name}: expected {_FIELDS[name][0]}, got {checks.summary(x)}"
            for name, x in values.items()
            if not _FIELDS[name][1](x)
        ]
        for low, high in _IN_ORDER:
            if not problems and low in values and not values[low] < values[high]:
                got = f"{values[low]} and {values[high]}"
                problems.append(f"{low}: expected less than {high}, got {got}")
        checks.raise_all(type(self).__name__, problems)


@dataclasses.dataclass(frozen=True)
class Rotary(_Settings):
    """Rotary positions: which features of a head are rotated, and how fast.

    Args:
      base: the base of the frequencies base^(−2m/dim), m = 0 … dim/2 − 1.
      dim: the number of features of a head that are rotated, from the first on; all if None.
      interleaved: True pairs features (2m, 2m + 1), as Meta's Llama and GPT-J do; False pairs (m, m
        + dim/2), as transformers' Llama and GPT-NeoX do.
      scaling: None, Linear, DynamicNTK, Llama3 or Yarn, of `jax_attn.attention.rotary`.

    Raises:
      ArgumentError: lists every problem with the arguments.
    """

    base: float = 10000.0
    dim: int | None = None
    interleaved: bool = False
    scaling: "Scaling" = None

    def problems(self, head_dim: int) -> list[str]:
        """Say why heads of this size cannot be rotated so."""
        dim, problems = head_dim if self.dim is None else self.dim, []
        if dim > head_dim:
            problems.append(f"rotary: expected dim ≤ head_dim = {head_dim}, got dim = {dim}")
        if dim % 2:
            problems.append(f"rotary: expected an even head_dim, or a dim, got head_dim = {dim}")
        if dim < 4 and isinstance(self.scaling, DynamicNTK):
            problems.append(f"rotary: DynamicNTK expects at least 4 rotated features, got {dim}")
        return problems

    def frequencies(self, dim: int, dtype: np.dtype, length: Length) -> Frequencies:
        """Return radians per position (dim/2,), and the factor for both features of a pair."""
        if self.scaling is None:
            return 1 / _powers(self.base, dim, dtype), 1.0
        return self.scaling.frequencies(self.base, dim, dtype, length)


@dataclasses.dataclass(frozen=True)
class Linear(_Settings):
    """Divide every frequency by factor (Chen et al., "Position Interpolation", 2023)."""

    factor: float

    def frequencies(self, base: float, dim: int, dtype: np.dtype, length: Length) -> Frequencies:
        return 1 / _powers(base, dim, dtype) / self.factor, 1.0


@dataclasses.dataclass(frozen=True)
class DynamicNTK(_Settings):
    """Let the base grow with the length of the text, once it exceeds original_length.

    base · (factor·length/original_length − (factor − 1))^(dim/(dim − 2)): the slowest pair is
    slowed most, the fastest not at all (bloc97 and emozilla, 2023). Frequencies change with the
    length: keys rotated for a shorter text do not fit the queries of a longer one.
    """

    factor: float
    original_length: int

    def frequencies(self, base: float, dim: int, dtype: np.dtype, length: Length) -> Frequencies:
        longer = jnp.maximum(jnp.asarray(length, dtype), self.original_length)
        stretch = self.factor * longer / self.original_length - (self.factor - 1)
        powers = (base * stretch ** (dim / (dim - 2))) ** _exponents(dim, dtype)
        # Powers computed at run time are less accurate than those computed while tracing.
        powers = jnp.where(longer > self.original_length, powers, _powers(base, dim, dtype))
        return 1 / powers, 1.0


@dataclasses.dataclass(frozen=True)
class Llama3(_Settings):
    """Divide slow pairs by factor, keep fast ones, and interpolate in between.

    Slow: fewer than low_freq_factor turns in original_length; fast: more than high_freq_factor
    (Llama 3.1; Grattafiori et al., "The Llama 3 Herd of Models", 2024).
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_length: int

    def frequencies(self, base: float, dim: int, dtype: np.dtype, length: Length) -> Frequencies:
        fast = 1 / _powers(base, dim, dtype)
        turns = self.original_length / (2 * math.pi / fast)
        mix = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        mix = np.clip(mix, 0, 1)
        return (1 - mix) * fast / self.factor + mix * fast, 1.0


@dataclasses.dataclass(frozen=True)
class Yarn(_Settings):
    """Divide slow pairs by factor, keep fast ones, interpolate in between, and sharpen the scores.

    Slow: at most beta_slow turns in original_length; fast: at least beta_fast. If truncate, the
    pairs at the two bounds are rounded outwards. Both features of a pair are multiplied by
    attention_factor; if that is None, by m(mscale)/m(mscale_all_dim) if both are given and not 0,
    else by m(1), with m(s) = 0.1·s·ln(factor) + 1 (Peng et al., "YaRN", 2023; mscale: DeepSeek-AI,
    "DeepSeek-V2", 2024).
    """

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def frequencies(self, base: float, dim: int, dtype: np.dtype, length: Length) -> Frequencies:
        powers = _powers(base, dim, dtype)
        first, last = self._bounds(base, dim)
        ramp = (np.arange(dim // 2, dtype=dtype) - first) / (last - first)
        fast = 1 - np.clip(ramp, 0, 1)
        return 1 / (self.factor * powers) * (1 - fast) + 1 / powers * fast, self._growth()

    def _bounds(self, base: float, dim: int) -> tuple[float, float]:
        """Return the last pair that is kept and the first that is divided by all of factor."""

        def pair(turns: float) -> float:
            return dim * math.log(self.original_length / (turns * 2 * math.pi)) / 2 / math.log(base)

        first, last = pair(self.beta_fast), pair(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, dim - 1)
        return first, last + 0.001 if first == last else last

    def _growth(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor

        def m(scale: float) -> float:
            return 0.1 * scale * math.log(self.factor) + 1

        if self.mscale and self.mscale_all_dim:
            return m(self.mscale) / m(self.mscale_all_dim)
        return m(1)


def _exponents(dim: int, dtype: np.dtype) -> np.ndarray:
    return np.arange(0, dim, 2, dtype=dtype) / dim


def _powers(base: float, dim: int, dtype: np.dtype) -> np.ndarray:
    """Return base^(2m/dim), rounded as in transformers: position p multiplies its error by p."""
    return (base ** _exponents(dim, dtype).astype(np.float64)).astype(dtype)


Scaling = Linear | DynamicNTK | Llama3 | Yarn | None


def _at_least(least: float) -> Callable[[Any], bool]:
    return lambda x: checks.is_real(x) and x >= least


def _above(bound: float) -> Callable[[Any], bool]:
    return lambda x: checks.is_real(x) and x > bound


# For each field what is expected, in words and as a predicate.
_FIELDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "base": ("a finite number > 1", _above(1)),
    "dim": ("an even int ≥ 2, or None", lambda x: x is None or (checks.is_count(x) and x % 2 == 0)),
    "interleaved": ("True or False", lambda x: isinstance(x, bool)),
    "scaling": ("Linear, DynamicNTK, Llama3, Yarn or None", lambda x: isinstance(x, Scaling)),
    "factor": ("a finite number ≥ 1", _at_least(1)),
    "original_length": ("an int ≥ 1", checks.is_count),
    "low_freq_factor": ("a finite number > 0", _above(0)),
    "high_freq_factor": ("a finite number > 0", _above(0)),
    "beta_fast": ("a finite number > 0", _above(0)),
    "beta_slow": ("a finite number > 0", _above(0)),
    "attention_factor": ("a finite number > 0, or None", lambda x: x is None or _above(0)(x)),
    "mscale": ("a finite number ≥ 0, or None", lambda x: x is None or _at_least(0)(x)),
    "mscale_all_dim": ("a finite number ≥ 0, or None", lambda x: x is None or _at_least(0)(x)),
    "truncate": ("True or False", lambda x: isinstance(x, bool)),
}

# Pairs of fields whose first must be smaller than the second.
_IN_ORDER = (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast"))


def _is_length(x: Any) -> bool:
    if checks.is_int(x):
        return checks.is_count(x)
    return checks.is_integer_array(x) and x.shape == ()
