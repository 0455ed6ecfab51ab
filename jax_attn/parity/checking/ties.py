"""Maxima of equal numbers: which of them gets the gradient is a convention.

torch's `max(dim)` and its pools give it to one of them, `amax` to all of them in equal parts, and
`maximum` to both by halves. The usual JAX expressions give it to others.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Other(NamedTuple):
    """Another convention. usual: the JAX expression that has it. goes_to: who gets the gradient.

    result: (torch's result, *arguments) -> the same numbers, with a gradient by this convention.
    """

    usual: str
    goes_to: str
    result: Callable[..., Any]


class Tie(NamedTuple):
    """An operator that takes a maximum, or a minimum.

    ties: (*arguments) -> how many of its results have several equal numbers, and how many it has.
    torchs: who gets the gradient in torch. remedy: an expression with torch's.
    """

    ties: Callable[..., tuple[int, int]]
    torchs: str
    others: tuple[Other, ...]
    remedy: str


_SHARES, _ONE, _HALVES = "all of them, in equal parts", "the first of them", "both, by halves"


def _along(x: Tensor, dim: Any) -> tuple[int, ...]:
    dims = (dim,) if isinstance(dim, int) else tuple(dim or ())
    return dims or tuple(range(x.ndim))


def _count(extreme: Callable[..., Tensor], x: Tensor, dim: Any = ()) -> tuple[int, int]:
    dims = _along(x, dim)
    equal = (x == extreme(x, dims, keepdim=True)).sum(dims)
    return int((equal > 1).sum()), equal.numel()


def _shared(
    extreme: Callable[..., Tensor], result: Any, x: Tensor, dim: Any = None,
    keepdim: bool = False, **named: Any,
) -> Any:  # fmt: skip
    """Give all equal numbers a share, in place of the one that `max(dim)` takes."""
    dim = named.get("dim", dim)
    if not isinstance(dim, int) or not isinstance(result, tuple):
        return result  # of all numbers, or of two tensors: shared already
    values = extreme(x, dim, keepdim=named.get("keepdim", keepdim))
    return type(result)((values, result[1]))


def _to_one(
    nth: Callable[..., Tensor], result: Any, x: Tensor, dim: Any = (),
    keepdim: bool = False, **named: Any,
) -> Any:  # fmt: skip
    """Give the first of equal numbers the whole, in place of a share to each."""
    if not isinstance(result, Tensor) or isinstance(dim, Tensor):
        return result
    dims = sorted(d % x.ndim for d in _along(x, named.get("dim", dim)))
    kept = [d for d in range(x.ndim) if d not in dims]
    flat = x.permute(*kept, *dims).flatten(len(kept))
    return flat.gather(-1, nth(flat, -1, keepdim=True)).reshape(result.shape)


def _reduces(extreme: Callable[..., Tensor], nth: Callable[..., Tensor], jaxs: str) -> Tie:
    """Return the tie of an operator that gives all equal numbers a share."""

    def count(*args: Any, **named: Any) -> tuple[int, int]:
        return _count(extreme, args[0], named.get("dim", args[1] if len(args) > 1 else ()))

    def result(own: Any, *args: Any, **named: Any) -> Any:
        return _to_one(nth, own, *args, **named)

    other = Other(f"jnp.take_along_axis with jnp.arg{jaxs}", _ONE, result)
    return Tie(count, _SHARES, (other,), f"jnp.{jaxs}(x, axis)")


def _selects(extreme: Callable[..., Tensor], nth: Callable[..., Tensor], jaxs: str) -> Tie:
    """Return the tie of `max` and `min`, which take one number along an axis; all share without."""
    whole = _reduces(extreme, nth, jaxs)

    def along(own: Any, *args: Any, **named: Any) -> Any:
        return _shared(extreme, own, *args, **named)

    remedy = f"jnp.take_along_axis with jnp.arg{jaxs}, or jnp.{jaxs}(x) of all numbers,"
    others = (Other(f"jnp.{jaxs}(x, axis)", _SHARES, along), *whole.others)
    return Tie(whole.ties, "one of them along an axis, and to all of them without", others, remedy)


def _two(jaxs: str, first: Callable[..., Tensor], second: Callable[..., Tensor]) -> Tie:
    """Return the tie of the larger, or the smaller, of two tensors."""

    def count(x: Tensor, y: Tensor, *_: Any) -> tuple[int, int]:
        equal = x == y
        return int(equal.sum()), equal.numel()

    def taken(is_first: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda own, x, y, **_: torch.where(is_first(x, y), x, y)

    sign = ">" if jaxs == "maximum" else "<"
    others = (
        Other(f"jnp.where(x {sign} y, x, y)", "the second", taken(second)),
        Other(f"jnp.where(x {sign}= y, x, y)", "the first", taken(first)),
    )
    return Tie(count, _HALVES, others, f"jnp.{jaxs}(x, y)")


def _windows(
    x: Tensor,
    kernel: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    *_: Any,
    **__: Any,
) -> Tensor | None:  # fmt: skip
    """Return the windows of a pool along the last axis; None if they have gaps."""

    def each(given: Any) -> list[int]:
        return [given] * axes if isinstance(given, int) else [*given] * (axes // len(given))

    axes = x.ndim - 2
    sizes, pads = each(kernel), each(padding)
    if axes < 1 or max(each(dilation)) > 1:
        return None
    around = [pad for pad in reversed(pads) for _ in range(2)]
    first, x = x.ndim - axes, torch.nn.functional.pad(x, around, value=-torch.inf)
    for axis, (size, step) in enumerate(zip(sizes, each(stride) if stride else sizes, strict=True)):
        if size > x.shape[first + axis]:
            return None  # one of ceil_mode's
        x = x.unfold(first + axis, size, step)
    return x.flatten(first + axes)


def _count_windows(x: Tensor, *args: Any, **named: Any) -> tuple[int, int]:
    windows = _windows(x, *args, **named)
    return (0, 0) if windows is None else _count(torch.amax, windows, -1)


def _pooled(own: Any, x: Tensor, *args: Any, **named: Any) -> Any:
    windows = _windows(x, *args, **named) if isinstance(own, Tensor) else None
    shape = None if windows is None else windows.shape[:-1]
    return own if windows is None or shape != own.shape else windows.amax(-1)


_POOL = Tie(
    _count_windows,
    "the first of them",
    (Other("jnp.max of a reshaped array", _SHARES, _pooled),),
    "flax.linen.max_pool",
)
TIES = {
    "amax": _reduces(torch.amax, torch.argmax, "max"),
    "amin": _reduces(torch.amin, torch.argmin, "min"),
    "max": _selects(torch.amax, torch.argmax, "max"),
    "max_pool2d_with_indices": _POOL,
    "maximum": _two("maximum", torch.ge, torch.gt),
    "min": _selects(torch.amin, torch.argmin, "min"),
    "minimum": _two("minimum", torch.le, torch.lt),
}
"""Operator -> its tie."""
