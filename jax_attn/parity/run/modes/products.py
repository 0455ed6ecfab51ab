"""Split products into steps: those with a bias, and those of groups of rows with a matrix each.

torch rounds a product and its bias once; flax's layers round the product before they add the bias.
torch's kernel for products of groups does not accept float64.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload

_aten = torch.ops.aten
_PRODUCTS = {"addmm": _aten.mm.default, "baddbmm": _aten.bmm.default}


class Apart(NamedTuple):
    """The product in an operator, the product's arguments, and the bias that is added to it."""

    product: OpOverload
    factors: tuple
    bias: torch.Tensor


def apart(func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Apart | None:
    """Return the product and bias of an operator; None if it adds no bias, or scales either."""
    name = func.overloadpacket.__name__
    if name in _PRODUCTS and not kwargs:
        return Apart(_PRODUCTS[name], tuple(args[1:]), args[0])
    if name == "convolution" and args[2] is not None:
        bias = args[2].view(-1, *[1] * (args[1].ndim - 2))
        return Apart(func, (*args[:2], None, *args[3:]), bias)
    return None


def bias_gradient_apart(func: OpOverload, args: tuple) -> tuple[tuple, tuple] | None:
    """Return the arguments of a convolution's backward pass without its bias, and of the sum that
    is the bias's gradient; None for other operators, and without a bias."""
    if func.overloadpacket.__name__ != "convolution_backward" or not args[-1][2]:
        return None
    *others, (of_input, of_weight, _) = args
    over = [0, *range(2, args[0].ndim)]
    return (*others, [of_input, of_weight, False]), (args[0], over)


Product = Callable[[Any, tuple, dict[str, Any]], torch.Tensor]
GROUPED = "_grouped_mm"


def grouped_product(product: Product, a: torch.Tensor, b: torch.Tensor, ends: Any) -> torch.Tensor:
    """Compute a product group by group: of rows, (M, K) and (G, K, N) -> (M, N); or of columns,
    (K, M) and (M, N) -> (G, K, N), as in a backward pass.

    product: computes an operator's result. ends: (G,), the end of each group along M. Rows outside
    every group are 0.
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
