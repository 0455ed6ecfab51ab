"""Sums with a mask's fill (-1e9, `finfo.min`), as the dtype under test computes them.

Added to a fill, a score is lost in float32, and the sum of two fills overflows. In float64 neither
happens, so a row in which every key is masked would differ: float64 would give a softmax of the
scores, but float32 gives every key the same weight.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch

from jax_attn.parity.run.modes.draws import in_parts
from jax_attn.parity.run.modes.many_runs import RunsTensor
from jax_attn.parity.run.modes.rounding import DrawnRounding

FLOAT32 = 2.0**-24
"""The roundoff of a sum in float32, in which kernels of narrower dtypes add too."""

SUMS_OF_TWO = ("add", "sub", "rsub")
_HALF = np.uint64(2**63)


class Summands(NamedTuple):
    """The two float64 summands of a sum, as tensors."""

    a: torch.Tensor
    b: torch.Tensor

    @classmethod
    def of(cls, name: str, args: tuple, kwargs: dict[str, Any]) -> "Summands":
        """Return the summands of an operator of `SUMS_OF_TWO`, called with these arguments."""
        first, second = (torch.as_tensor(x, dtype=torch.float64) for x in args[:2])
        if (alpha := args[2] if len(args) > 2 else kwargs.get("alpha", 1)) != 1:
            first, second = (alpha * first, second) if name == "rsub" else (first, alpha * second)
        if name == "rsub":
            first, second = second, first
        return cls(first, second if name == "add" else -second)

    def absorbed(self, roundoff: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (a mask of where the smaller is lost in the larger, the larger), broadcast.

        The mask holds only where the larger's own rounding reaches 1; below that, losing the
        smaller is a rounding like any other."""
        swap = self.a.abs() < self.b.abs()
        larger, smaller = torch.where(swap, self.b, self.a), torch.where(swap, self.a, self.b)
        size = larger.abs()
        # Half the distance between neighbours of `larger`.
        reach = torch.ldexp(torch.full_like(size, roundoff), torch.frexp(size).exponent - 1)
        return (smaller.abs() < reach) & (size >= 1 / roundoff), larger


def is_one_of(result: torch.Tensor, operands: Iterable[Any]) -> torch.Tensor:
    """Return a mask of where the result of an operator equals one of its two operands."""
    first, second = (result == x for x in operands)
    return first.logical_or(second)


def largest(x: torch.Tensor) -> float:
    """Return the largest magnitude in x over all runs; NaN if x has NaN; 0 if x is empty."""
    x = x.each if isinstance(x, RunsTensor) else x
    low, high = (bound.item() for bound in torch.aminmax(x)) if x.numel() else (0.0, 0.0)
    return max(-low, high)


def as_kept(total: torch.Tensor, summands: Summands, dtype: torch.dtype) -> torch.Tensor:
    """Return a float64 sum of two without what `dtype` absorbs, and infinite where it overflows.

    A summand such as `torch.finfo(x.dtype).min` is that of float64 here; it counts as `dtype`'s.
    """
    if dtype is torch.float64:
        return total
    kept = torch.finfo(dtype)
    overflows = kept.max * (2 - kept.eps / 2) / (2 - kept.eps)  # half a unit above the largest
    if largest(total) < min(1 / FLOAT32, overflows):
        return total
    absorbed, larger = summands.absorbed(FLOAT32)
    bounded = torch.add(*(x.clamp(-kept.max, kept.max) for x in summands))
    total = torch.where(absorbed, larger, total)
    # Added to its own smallest number, a dtype keeps a summand of more than half a step there:
    # float16 keeps a score of 17; bfloat16 and float32 keep no score. In a row of fills that key
    # takes all the weight.
    stored = bounded.to(dtype).double()
    steps = (larger.abs() > kept.max) & larger.isfinite() & (stored.abs() < kept.max)
    total = torch.where(steps, stored, total)
    return torch.where(
        bounded.abs() >= overflows, torch.copysign(total.new_tensor(torch.inf), bounded), total
    )


def stored_of_two(
    rounding: DrawnRounding,
    dtype: torch.dtype,
    name: str,
    result: torch.Tensor,
    args: tuple,
    kwargs: dict[str, Any],
) -> torch.Tensor:
    """Store a sum or product of two, of a module in `dtype`. A sum that is 0 or equals a summand,
    and a fill times 1, are exact.

    Skips the search for exact sums if there is no fill and neither summand is a number.
    """
    store, acc = rounding.precision.store, rounding.precision.acc
    has_fill = largest(result) >= 1 / store
    if name == "mul":
        stored = rounding.stored(result)
        if not has_fill:
            return stored
        exact = is_one_of(result, args[:2]).logical_and_(result.abs() >= 1 / acc)
        return torch.where(exact, result, stored)
    if not has_fill and all(getattr(x, "ndim", 0) for x in args[:2]):
        return rounding.stored(result)
    of_storing, of_sum = rounding.draws.key(), rounding.draws.key()
    keeps_fill = rounding.draws.key() >= _HALF

    def kept(rows: slice, result: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        summands = Summands(a, b)
        stored = rounding.stored_part(result, of_storing[rows])
        exact = is_one_of(result, summands).logical_or_(result == 0)
        stored = torch.where(exact, result, stored)
        if store == acc or not has_fill:
            return stored
        # Fill plus score: just the fill if the sum is stored, both if it stays in float32.
        absorbed, fill = summands.absorbed(store)
        moved = rounding.moved(result, (acc * result).abs_(), of_sum[rows])
        near = torch.where(rounding.draws.flags(keeps_fill[rows]), fill, moved)
        # Sums with the dtype's own smallest number are already rounded by `as_kept`.
        stored = torch.where(absorbed, near, stored)
        return torch.where(fill.abs() > torch.finfo(dtype).max, result, stored)

    # Part by part, because each step makes a tensor, and a large model's gradients are long.
    return in_parts(kept, result, *(x.expand_as(result) for x in Summands.of(name, args, kwargs)))
