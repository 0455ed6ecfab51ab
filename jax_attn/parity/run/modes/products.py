"""Products that are taken apart: with a bias, and of groups of rows with a matrix each.

Torch rounds a product and its bias once, flax's layers keep the product first. A product of groups
is refused in float64 by torch's kernel.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload

_aten = torch.ops.aten
_PRODUCTS = {"addmm": _aten.mm.default, "baddbmm": _aten.bmm.default}


class Apart(NamedTuple):
    """An operator's product by itself, its arguments, and the bias that is added to it."""

    product: OpOverload
    factors: tuple
    bias: torch.Tensor


def apart(func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Apart | None:
    """None of what adds no bias, or a multiple of one, and of what keeps its factor."""
    name = func.overloadpacket.__name__
    if name in _PRODUCTS and not kwargs:
        return Apart(_PRODUCTS[name], tuple(args[1:]), args[0])
    if name == "convolution" and args[2] is not None:
        bias = args[2].view(-1, *[1] * (args[1].ndim - 2))
        return Apart(func, (*args[:2], None, *args[3:]), bias)
    return None


Product = Callable[[Any, tuple, dict[str, Any]], torch.Tensor]
GROUPED = "_grouped_mm"


def grouped_product(product: Product, a: torch.Tensor, b: torch.Tensor, ends: Any) -> torch.Tensor:
    """Group by group: of rows (M, K) with (G, K, N) -> (M, N); of columns (K, M) with rows (M, N)
    -> (G, K, N), as in a backward pass.

    product: computes an operator's result. ends: (G,), where each group ends along M. What no group
    holds is 0.
    """
    mm, start = torch.ops.aten.mm.default, 0
    of_rows = b.ndim == 3
    shape = (a.shape[0], b.shape[2]) if of_rows else (len(ends), a.shape[0], b.shape[1])
    out = a.new_zeros(shape)
    for group, end in enumerate(ends.tolist()):
        if of_rows:
            out[start:end] = product(mm, (a[start:end], b[group]), {})
        else:
            out[group] = product(mm, (a[:, start:end], b[start:end]), {})
        start = end
    return out
