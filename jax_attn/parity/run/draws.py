"""Uniform draws for a perturbed run, and elementwise work on tensors part by part.

A run of a large model draws a number for every element of every result, some hundred million: they
take as long as the products if they are made and used as they come. Hence numbers of 16 bits, of
which a roundoff's sign and size need no more, in a pool; and parts that stay in a core's cache.
"""

from collections.abc import Callable

import numpy as np
import torch

PART = 2**15
"""Elements: 256 KiB of float64, so that four tensors of them stay in a cache of 1 MiB."""


class Draws:
    """Numbers uniform in (-1, 1), by a generator of their own."""

    def __init__(self, seed: int):
        self._generator = np.random.SFC64(seed)
        self._pool, self._used = torch.empty(0), 0

    def like(self, x: torch.Tensor) -> torch.Tensor:
        """As many as x has elements, in its shape; float64, not to be written to."""
        count = x.numel()
        if count > PART:
            return self._made(count).view(x.shape)
        if self._used + count > len(self._pool):
            self._pool, self._used = self._made(PART), 0
        self._used += count
        return self._pool[self._used - count : self._used].view(x.shape)

    def one(self) -> float:
        return self.like(torch.empty(())).item()

    def _made(self, count: int) -> torch.Tensor:
        # The middles of 2**16 intervals of (-1, 1): as many above 0 as below.
        bits = self._generator.random_raw(-(-count // 4)).view(np.int16)[:count]
        return torch.from_numpy(bits).to(torch.float64).add_(0.5).mul_(2.0**-15)


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
