"""Uniform draws for a perturbed run, and elementwise work on tensors part by part.

A run of a large model draws a number for every element of every result, some hundred million. Made
and used one tensor at a time, they take as long as the products. So each draw is a hash of the
element, of a few operations, and tensors are processed in parts that stay in a core's cache.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from jax_attn.parity.run.modes.many_runs import RunsTensor, each_run, lifted

PART = 2**16
"""Elements per part: 512 KiB of float64, so that four tensors stay in a cache of 2 MiB. Half as
many take a tenth longer there."""

SCALE = 2.0**-63
"""Factor from a 64-bit integer to a number in (-1, 1)."""
SCALE_OF_PAIR = 2.0**-31
"""Factor from a 32-bit integer to a number in (-1, 1)."""
GOLDEN, MIXED = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)
"""Odd numbers of which half the bits are ones, from splitmix64."""


_KEYS = 256
"""The number of keys drawn at once."""

ALL = slice(None)

Key = np.ndarray
"""(runs,): a key for one operation in each run, so that its draws differ from another's."""


class Draws:
    """Numbers uniform in (-1, 1), the same for equal elements, which every library rounds alike.

    Otherwise a hundred equal rows, as of one token or of padding, would err independently, and the
    error that they share would seem a tenth of what it may be.
    """

    def __init__(self, seeds: int | Sequence[int]):
        """seeds: one for each run of a pass; a single number for one run, with plain tensors."""
        self.runs = None if isinstance(seeds, int) else len(seeds)
        self._generators = [
            np.random.SFC64(seed) for seed in ([seeds] if isinstance(seeds, int) else seeds)
        ]
        self._keys, self._drawn = np.empty((0, 0), np.uint64), 0

    def key(self) -> Key:
        """Make a key of each run for one operation."""
        if self._drawn == len(self._keys):
            keys = [generator.random_raw(_KEYS) for generator in self._generators]
            self._keys, self._drawn = np.stack(keys, axis=1), 0
        self._drawn += 1
        return self._keys[self._drawn - 1]

    def one(self) -> float | RunsTensor:
        """Draw a single number for each run."""
        numbers = self.key() * 2.0**-63 - 1
        return float(numbers[0]) if self.runs is None else RunsTensor(torch.from_numpy(numbers))

    def each(self, x: torch.Tensor) -> torch.Tensor:
        """Return the numbers of every run, (runs, *shape), not to be written to."""
        x = x.detach()
        return x[None] if self.runs is None else each_run(x, self.runs)

    def of(self, each: torch.Tensor) -> torch.Tensor:
        """Return the tensor of these numbers of every run."""
        return each[0] if self.runs is None else RunsTensor(each)

    def flags(self, of_runs: np.ndarray) -> torch.Tensor:
        """Return a boolean of each run, (runs,), as a tensor without axes."""
        return self.of(torch.from_numpy(of_runs))

    def lifted(self, x: torch.Tensor) -> torch.Tensor:
        """Return x, with numbers of its own for each run if there are several."""
        return x if self.runs is None else lifted(x, self.runs)

    def alike(self, x: torch.Tensor, key: Key, roundoff: float) -> torch.Tensor:
        """Draw a float64 number for each element of x, the same for elements that agree to an
        eighth of a unit in the last place. roundoff: half that unit, relative."""
        return self.of(self.unscaled(self.each(x), key, roundoff).mul_(SCALE))

    def unscaled(self, each: torch.Tensor, key: Key, roundoff: float) -> torch.Tensor:
        """Draw like `alike`, for (runs, *shape); the caller multiplies by SCALE itself."""
        bits = self._hashed(each, key, roundoff)
        return torch.from_numpy(bits.view(np.int64).astype(np.float64))

    def unscaled_pair(
        self, each: torch.Tensor, key: Key, roundoff: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw two independent numbers for each element; the caller multiplies by SCALE_OF_PAIR.
        They are the halves of one hash, which takes most of a draw's time."""
        halves = np.ascontiguousarray(self._hashed(each, key, roundoff)).view(np.int32)
        first, second = (halves[..., half::2].astype(np.float64) for half in (1, 0))
        return torch.from_numpy(first), torch.from_numpy(second)

    def _hashed(self, each: torch.Tensor, key: Key, roundoff: float) -> np.ndarray:
        bits = each.double().numpy().view(np.uint64) + key.reshape(-1, *[1] * (each.ndim - 1))
        bits >>= np.uint64(unused_bits(roundoff))
        bits *= GOLDEN
        bits ^= bits >> np.uint64(32)
        bits *= MIXED
        return bits


def unused_bits(roundoff: float) -> int:
    """Return how many low bits of a float64 lie below an eighth of a unit; roundoff: half of it."""
    return max(0, 49 + math.frexp(roundoff)[1])


def in_parts(
    change: Callable[..., torch.Tensor], *tensors: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return change(rows, *tensors), an elementwise function of tensors of one shape, computed part
    by part if they are long.

    rows: the runs of a pass that a part belongs to, as an index of a `Key`. out: a tensor for the
    result of a long one, perhaps one of `tensors`; None makes a new one.
    """
    first = tensors[0]
    if isinstance(first, RunsTensor):
        return _in_groups_of_runs(change, first, *tensors)
    if first.numel() <= PART or not all(x.is_contiguous() for x in tensors):
        return laid_out_as(first, change(ALL, *tensors))
    out = torch.empty_like(first) if out is None else out
    for written, *parts in zip(*(x.view(-1).split(PART) for x in (out, *tensors)), strict=True):
        written.copy_(change(ALL, *parts))
    return out


def laid_out_as(x: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """Return the result with the strides of x, by which torch chooses kernels and views."""
    if result.stride() == x.stride():
        return result
    out = torch.empty_like(x, dtype=result.dtype, memory_format=torch.preserve_format)
    return result if out.stride() == result.stride() else out.copy_(result)


def _in_groups_of_runs(
    change: Callable[..., torch.Tensor], first: RunsTensor, *tensors: torch.Tensor
) -> torch.Tensor:
    runs, at_once = len(first.each), max(1, PART // max(1, first.numel()))
    if runs <= at_once:
        return change(ALL, *tensors)
    each = [each_run(x, runs) for x in tensors]
    out = torch.empty(first.each.shape, dtype=torch.float64)
    for start in range(0, runs, at_once):
        rows = slice(start, start + at_once)
        changed = change(rows, *(RunsTensor(x[rows]) for x in each))
        out[rows] = each_run(changed, runs)
    return RunsTensor(out)
