"""Sides: on which side of a bound numbers lie (a ReLU's 0), or which of several is the largest.

The value is continuous from one side to the other, but the gradient jumps.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor


def _between(x: Tensor, low: Any = None, high: Any = None, **named: Any) -> Tensor:
    low, high = named.get("min", low), named.get("max", high)
    above = x.new_zeros(x.shape).int() if low is None else (x > low).int()
    return above if high is None else above + (x >= high).int()


def _largest(x: Tensor, dim: Any = None, *_: Any, **__: Any) -> Tensor:
    """Return a mask of the largest elements along the axes `dim`; None or [] means all."""
    dims = list(range(x.ndim)) if dim is None or dim == [] else dim
    return x == x.amax(dims, keepdim=True)


def _smallest(x: Tensor, dim: Any = None, *_: Any, **__: Any) -> Tensor:
    return _largest(-x, dim)


SIDES: dict[str, Callable[..., Tensor]] = {
    "abs": lambda x: x > 0,
    "amax": _largest,
    "amin": _smallest,
    "clamp": _between,
    "clamp_max": lambda x, high: x > high,
    "clamp_min": lambda x, low: x > low,
    "hardsigmoid": lambda x: _between(x, -3.0, 3.0),
    "hardswish": lambda x: _between(x, -3.0, 3.0),
    "hardtanh": lambda x, low=-1.0, high=1.0: _between(x, low, high),
    "leaky_relu": lambda x, *_: x > 0,
    "max": lambda x, *dim: x > dim[0] if dim and isinstance(dim[0], Tensor) else _largest(x, *dim),
    "maximum": lambda x, y: x > y,
    "min": lambda x, *dim: x < dim[0] if dim and isinstance(dim[0], Tensor) else _smallest(x, *dim),
    "minimum": lambda x, y: x < y,
    "relu": lambda x: x > 0,
    "threshold": lambda x, bound, _: x > bound,
}
"""Operator's name, without a trailing "_" -> function of its arguments that returns the sides."""
