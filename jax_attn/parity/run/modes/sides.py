"""Sides: on which side of a bound numbers lie (a ReLU's 0), or which of several is the largest.

The value is continuous from one side to the other, but the gradient jumps.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor


def as_rows(x: Tensor, dims: Iterable[int]) -> Tensor:
    """Return x with the axes `dims` merged into its last one; no axes mean all."""
    if not x.ndim:
        return x[None]
    last = sorted(d % x.ndim for d in dims) or list(range(x.ndim))
    kept = [d for d in range(x.ndim) if d not in last]
    return x.permute(*kept, *last).flatten(len(kept))


def axes(dim: Any) -> tuple[int, ...]:
    """Return the axes that an argument `dim` names: a number, several, or none for all."""
    return (dim,) if isinstance(dim, int) else tuple(dim or ())


def _between(x: Tensor, low: Any = None, high: Any = None, **named: Any) -> Tensor:
    low, high = named.get("min", low), named.get("max", high)
    above = x.new_zeros(x.shape).int() if low is None else (x > low).int()
    return above if high is None else above + (x >= high).int()


def _dim(_: Tensor, dim: Any = (), *others: Any, **named: Any) -> Any:
    return dim


def _dim_of_kth(_: Tensor, k: int, dim: int = -1, *others: Any, **named: Any) -> Any:
    return dim


_DIMS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("amax", "amin", "max", "median", "min", "nanmedian"), _dim),
    "kthvalue": _dim_of_kth,
}
"""Operator that takes one number along axes -> function of its arguments that returns them."""


def takes_one(name: str, args: tuple, kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call takes one of several numbers of a tensor, such as the largest."""
    return name in _DIMS and not isinstance(_DIMS[name](*args, **kwargs), Tensor)


def _taken(name: str, args: tuple, kwargs: Mapping[str, Any]) -> Tensor:
    """Return a mask, as rows, of the numbers that equal the one taken."""
    rows = as_rows(args[0], axes(_DIMS[name](*args, **kwargs)))
    result = getattr(torch.ops.aten, name)(*args, **kwargs)
    value = result if isinstance(result, Tensor) else result[0]
    return rows == value.reshape(*rows.shape[:-1], 1)


def one_of(mask: Tensor, name: str, result: Any, args: tuple, kwargs: Mapping[str, Any]) -> Any:
    """Return a result with the number at the mask's first element in place of each one taken."""
    index = mask.int().argmax(-1, keepdim=True)
    values = as_rows(args[0], axes(_DIMS[name](*args, **kwargs))).gather(-1, index)
    if isinstance(result, Tensor):
        return values.reshape(result.shape)
    return values.reshape(result[0].shape), index.reshape(result[1].shape)


_BOUNDS: dict[str, Callable[..., Tensor]] = {
    "abs": lambda x: x > 0,
    "clamp": _between,
    "clamp_max": lambda x, high: x > high,
    "clamp_min": lambda x, low: x > low,
    "hardsigmoid": lambda x: _between(x, -3.0, 3.0),
    "hardswish": lambda x: _between(x, -3.0, 3.0),
    "hardtanh": lambda x, low=-1.0, high=1.0: _between(x, low, high),
    "leaky_relu": lambda x, *_: x > 0,
    "max": lambda x, other: x > other,
    "maximum": lambda x, y: x > y,
    "min": lambda x, other: x < other,
    "minimum": lambda x, y: x < y,
    "relu": lambda x: x > 0,
    "threshold": lambda x, bound, _: x > bound,
}
"""Operator's name, without a trailing "_" -> function of its arguments that returns the sides."""
SIDES = frozenset({*_BOUNDS, *_DIMS})
"""Operators that take a side."""


def side(name: str, args: tuple, kwargs: Mapping[str, Any]) -> Tensor:
    """Return the sides that a call takes; an in-place call has not written yet."""
    if takes_one(name, args, kwargs):
        return _taken(name, args, kwargs)
    return _BOUNDS[name](*args, **kwargs)
