"""Products with a bias, taken apart: torch rounds once, flax's layers keep the product first."""

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
