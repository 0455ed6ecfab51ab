"""What the rounding of a sum depends on: its terms, and whether they are small integers."""

from collections.abc import Callable
from typing import Any

import torch

Terms = tuple[torch.Tensor, int]
"""The sum of squared terms, and the number of terms."""


def _matmul_terms(a: torch.Tensor, b: torch.Tensor) -> Terms:
    return a.square() @ b.square(), a.shape[-1]


def _sum_terms(x: torch.Tensor, dim: Any = None, keepdim: bool = False, **_: Any) -> Terms:
    dims = list(range(x.ndim)) if not dim and dim != 0 else [dim] if isinstance(dim, int) else dim
    squares = x.square().sum(dim=dims, keepdim=keepdim)
    return squares, x.numel() // max(squares.numel(), 1)


def _mean_terms(x: torch.Tensor, dim: Any = None, keepdim: bool = False, **_: Any) -> Terms:
    squares, terms = _sum_terms(x, dim, keepdim)
    return squares / max(terms, 1) ** 2, terms


# Sums of products, by operator; called with its arguments.
SUMS: dict[str, Callable[..., Terms]] = {
    "mm": _matmul_terms,
    "bmm": _matmul_terms,
    "mv": _matmul_terms,
    "dot": _matmul_terms,
    "addmm": lambda c, a, b, **_: _matmul_terms(a, b),
    "baddbmm": lambda c, a, b, **_: _matmul_terms(a, b),
    "sum": _sum_terms,
    "mean": _mean_terms,
}


def is_count(total: torch.Tensor, squares: torch.Tensor, roundoff: float) -> torch.Tensor | None:
    """Where a sum is one of small integers, which is exact in any order; None where nowhere."""
    whole = total == total.round()
    if not whole.any():
        return None
    return whole.logical_and_(squares == squares.round()).logical_and_(squares < 1 / roundoff)
