"""Uniform draws for a perturbed run, and elementwise work on tensors part by part.

A run of a large model draws a number for every element of every result, some hundred million: they
take as long as the products if they are made and used as they come. Hence a hash of the element, of
a few operations, and parts that stay in a core's cache.
"""

import math
from collections.abc import Callable

import numpy as np
import torch

PART = 2**16
"""Elements: 512 KiB of float64, so that four tensors of them stay in a cache of 2 MiB. Half as many
take a tenth longer there."""

SCALE = 2.0**-63
"""Of a 64-bit integer, to a number in (-1, 1)."""
_GOLDEN, _MIXED = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)
"""Odd numbers whose bits are half ones, of splitmix64."""


class Draws:
    """Numbers uniform in (-1, 1), the same for equal numbers, which every library rounds alike.

    Otherwise a hundred rows that are the same, as of one token or of padding, would seem to err
    each by itself, and what they share of an error by a tenth of what it may be.
    """

    def __init__(self, seed: int):
        self._generator = np.random.SFC64(seed)

    def key(self) -> np.uint64:
        """What one operation's draws differ by from another's."""
        return np.uint64(self._generator.random_raw())

    def one(self) -> float:
        """A single number."""
        return float(self.key()) * 2.0**-63 - 1

    def alike(self, x: torch.Tensor, key: np.uint64, roundoff: float) -> torch.Tensor:
        """A number for each of x, float64: of those alike to an eighth of a unit in the last place
        the same. roundoff: half that unit, relative."""
        return self.unscaled(x, key, roundoff).mul_(SCALE)

    def unscaled(self, x: torch.Tensor, key: np.uint64, roundoff: float) -> torch.Tensor:
        """Likewise, for a caller that multiplies by SCALE itself."""
        exponent = math.frexp(roundoff)[1]
        unused = np.uint64(max(0, 49 + exponent))
        bits = x.detach().double().numpy()[None].view(np.uint64) + key
        bits >>= unused
        bits *= _GOLDEN
        bits ^= bits >> np.uint64(32)
        bits *= _MIXED
        return torch.from_numpy(bits.view(np.int64).astype(np.float64))[0]


def in_parts(
    change: Callable[..., torch.Tensor], *tensors: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """change(*tensors), elementwise and of tensors of one shape; part by part where they are long.

    out: where that may be written then, one of the tensors perhaps; None: a new one.
    """
    first = tensors[0]
    if first.numel() <= PART or not all(x.is_contiguous() for x in tensors):
        return change(*tensors)
    out = torch.empty_like(first) if out is None else out
    for written, *parts in zip(*(x.view(-1).split(PART) for x in (out, *tensors)), strict=True):
        written.copy_(change(*parts))
    return out
