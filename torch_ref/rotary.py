"""Rotary positions: pairs of a head's features rotated by an angle that grows with the position.

Su et al. 2021, arXiv:2104.09864, and the scalings of its frequencies for longer texts; names and
order as in ``jax_attn.attention.rotary``. Angles are computed in float32, as in transformers, or in
float64 for float64.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# Radians per position (dim/2,), and the factor that multiplies both features of a pair.
Frequencies = tuple[Tensor, float]


def rotate(
    x: Tensor, positions: Tensor | None, rotary: "Rotary", *, length: int | None = None
) -> Tensor:
    """Rotate the feature pairs of x (B, T, N, H), each by its position; rounded once, to x's dtype.

    positions: integers (T,) or (B, T); 0 … T−1 if None. length: the length of the text, for
    DynamicNTK; the largest position + 1 unless given. Features beyond rotary.dim are unchanged.
    Raises ValueError that names the argument.
    """
    rotary.check(x.shape[3])
    if positions is None:
        positions = torch.arange(x.shape[1], device=x.device)
    if tuple(positions.shape) not in ((x.shape[1],), tuple(x.shape[:2])):
        expected = f"{(x.shape[1],)} or {tuple(x.shape[:2])}"
        raise ValueError(f"positions: expected {expected}, got {tuple(positions.shape)}")
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    dim = x.shape[3] if rotary.dim is None else rotary.dim
    length = int(positions.max()) + 1 if length is None else length
    frequencies_M, growth = rotary.frequencies(dim, dtype, length)
    angles_BTM = positions[..., None].to(dtype) * frequencies_M.to(x.device)
    angles_BT1M = angles_BTM.unsqueeze(-2)
    cos, sin = torch.cos(angles_BT1M) * growth, torch.sin(angles_BT1M) * growth

    pairs, axis = ((dim // 2, 2), -1) if rotary.interleaved else ((2, dim // 2), -2)
    a, b = x[..., :dim].to(dtype).unflatten(-1, pairs).unbind(axis)
    turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=axis).flatten(-2)
    return torch.cat((turned.to(x.dtype), x[..., dim:]), dim=-1)


@dataclass(frozen=True)
class Rotary:
    """Rotary positions: which features are rotated, and how fast.

    base: that of the frequencies base^(−2m/dim). dim: the number of rotated features, from the
    first on; all if None. interleaved: pairs (2m, 2m + 1), else (m, m + dim/2). scaling: None,
    Linear, DynamicNTK, Llama3 or Yarn.
    """

    base: float = 10000.0
    dim: int | None = None
    interleaved: bool = False
    scaling: "Linear | DynamicNTK | Llama3 | Yarn | None" = None

    def check(self, head_dim: int) -> None:
        """Raise ValueError if heads of this size cannot be rotated so."""
        dim = head_dim if self.dim is None else self.dim
        if dim % 2 or not 2 <= dim <= head_dim:
            raise ValueError(f"rotary: expected an even dim of 2 to head_dim={head_dim}, got {dim}")

    def frequencies(self, dim: int, dtype: torch.dtype, length: int) -> Frequencies:
        if self.scaling is None:
            return 1.0 / _powers(self.base, dim, dtype), 1.0
        return self.scaling.frequencies(self.base, dim, dtype, length)


@dataclass(frozen=True)
class Linear:
    """Divide every frequency by factor (Chen et al. 2023, arXiv:2306.15595)."""

    factor: float

    def frequencies(self, base: float, dim: int, dtype: torch.dtype, length: int) -> Frequencies:
        return 1.0 / _powers(base, dim, dtype) / self.factor, 1.0


@dataclass(frozen=True)
class DynamicNTK:
    """Let the base grow with the length of the text, once it exceeds original_length."""

    factor: float
    original_length: int

    def frequencies(self, base: float, dim: int, dtype: torch.dtype, length: int) -> Frequencies:
        longer = max(length, self.original_length)
        stretch = self.factor * longer / self.original_length - (self.factor - 1)
        return 1.0 / _powers(base * stretch ** (dim / (dim - 2)), dim, dtype), 1.0


@dataclass(frozen=True)
class Llama3:
    """Divide slow pairs by factor, keep fast ones, and interpolate in between (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_length: int

    def frequencies(self, base: float, dim: int, dtype: torch.dtype, length: int) -> Frequencies:
        fast = 1.0 / _powers(base, dim, dtype)
        turns = self.original_length / (2 * math.pi / fast)
        mix = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        mix = mix.clamp(0, 1)
        return (1 - mix) * fast / self.factor + mix * fast, 1.0


@dataclass(frozen=True)
class Yarn:
    """Scale like Llama3, between pairs given by beta_fast and beta_slow turns; sharpen the scores.

    Peng et al. 2023, arXiv:2309.00071.
    """

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def frequencies(self, base: float, dim: int, dtype: torch.dtype, length: int) -> Frequencies:
        powers = _powers(base, dim, dtype)
        first, last = self._bounds(base, dim)
        fast = 1 - ((torch.arange(dim // 2, dtype=dtype) - first) / (last - first)).clamp(0, 1)
        return 1.0 / (self.factor * powers) * (1 - fast) + 1.0 / powers * fast, self._growth()

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


def _powers(base: float, dim: int, dtype: torch.dtype) -> Tensor:
    """Return base^(2m/dim)."""
    return base ** (torch.arange(0, dim, 2, dtype=dtype) / dim)
