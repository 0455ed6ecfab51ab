"""Selections among equal numbers: which of them gets the gradient is a convention.

torch's `max(dim)` and its pools give it to one of them, `amax` to all of them in equal parts, and
`maximum` to both by halves. `topk`, `sort` and their like take equal numbers in some order. The
usual JAX expressions give it to others, or take them in another order.
"""

from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from jax_attn.parity.run.modes.sides import as_rows, axes


class Other(NamedTuple):
    """Another convention. usual: the JAX expression that has it. goes_to: who gets the gradient.

    result: (torch's result, *arguments) -> the same numbers, with a gradient by this convention.
    """

    usual: str
    goes_to: str
    result: Callable[..., Any]


class Tie(NamedTuple):
    """An operator that selects among its numbers.

    ties: (*arguments) -> how many of its results have several equal numbers, and how many it has.
    torchs: who gets the gradient in torch. remedy: an expression with torch's, or what to do.
    """

    ties: Callable[..., tuple[int, int]]
    torchs: str
    others: tuple[Other, ...]
    remedy: str


_SHARES, _ONE, _HALVES = "all of them, in equal parts", "the first of them", "both, by halves"


# --- numbers of some rank: maxima, medians, the largest k, sorted ones ----------------------------


class Ranks(NamedTuple):
    """Which numbers are selected: those of the ranks `at` along the axes `dims`; () means all."""

    dims: tuple[int, ...]
    descending: bool
    at: slice

    def flat(self, x: Tensor) -> Tensor:
        """Return x with its axes `dims` as the last one."""
        return as_rows(x, self.dims)

    def order(self, x: Tensor, *, from_end: bool = False) -> Tensor:
        """Return the indices of the selected numbers of `flat`, equal ones from the start or end.

        No mode sees how they are found: the reference takes no decision here.
        """
        with torch.no_grad(), _disable_current_modes():
            turned = x.detach().flip(-1) if from_end else x.detach()
            order = turned.argsort(dim=-1, descending=self.descending, stable=True)[..., self.at]
            return x.shape[-1] - 1 - order if from_end else order

    def as_result(self, taken: Tensor, shape: torch.Size) -> Tensor:
        """Return what was taken along the last axis, where torch's result has it."""
        return (taken.movedim(-1, self.dims[0]) if len(self.dims) == 1 else taken).reshape(shape)


def _extreme(x: Tensor, dim: Any = (), *_: Any, descending: bool, **__: Any) -> Ranks:
    return Ranks(axes(dim), descending, slice(1))


def _topk(x: Tensor, k: int, dim: int = -1, largest: bool = True, *_: Any, **__: Any) -> Ranks:
    return Ranks((dim,), largest, slice(k))


def _sort(x: Tensor, dim: int = -1, descending: bool = False, *_: Any, **named: Any) -> Ranks:
    return Ranks((dim,), descending, slice(None))


def _kthvalue(x: Tensor, k: int, dim: int = -1, *_: Any, **__: Any) -> Ranks:
    return Ranks((dim,), False, slice(k - 1, k))


def _median(x: Tensor, dim: Any = (), *_: Any, **__: Any) -> Ranks:
    count = (x.shape[dim] if isinstance(dim, int) else x.numel()) - 1
    return Ranks(axes(dim), False, slice(count // 2, count // 2 + 1))


def _count(ranks: Callable[..., Ranks], x: Tensor, *args: Any, **named: Any) -> tuple[int, int]:
    if not x.ndim or (args and isinstance(args[0], Tensor)):
        return 0, 0
    selected = ranks(x, *args, **named)
    flat = selected.flat(x)
    values = flat.gather(-1, selected._replace(at=slice(None)).order(flat))
    same = values[..., 1:] == values[..., :-1]
    none = same.new_zeros(*same.shape[:-1], 1)
    tied = (torch.cat([same, none], -1) | torch.cat([none, same], -1))[..., selected.at]
    return int(tied.sum()), tied.numel()


def _ordered(
    ranks: Callable[..., Ranks], from_end: bool, own: Any, x: Tensor, *args: Any, **named: Any
) -> Any:
    """Take equal numbers in the order of their places, in place of torch's order or shares."""
    if not (x.ndim and x.is_floating_point()) or (args and isinstance(args[0], Tensor)):
        return own
    selected = ranks(x, *args, **named)
    flat = selected.flat(x)
    order = selected.order(flat, from_end=from_end)

    def taken(part: Tensor) -> Tensor:
        numbers = flat.gather(-1, order) if part.is_floating_point() else order
        return selected.as_result(numbers, part.shape)

    return taken(own) if isinstance(own, Tensor) else type(own)(map(taken, own))


def _shared(
    extreme: Callable[..., Tensor], result: Any, x: Tensor, dim: Any = None,
    keepdim: bool = False, **named: Any,
) -> Any:  # fmt: skip
    """Give all equal numbers a share, in place of the one that `max(dim)` takes."""
    if not isinstance(dim, int) or not isinstance(result, tuple):
        return result  # of all numbers, or of two tensors: shared already
    return type(result)((extreme(x, dim, keepdim=keepdim), result[1]))


def _ranked(
    ranks: Callable[..., Ranks], torchs: str, usual: str, remedy: str, *shared: Other
) -> Tie:
    """Return the tie of an operator that selects by rank. usual: takes the first of equal ones."""
    others = (
        *shared,
        Other(usual, _ONE, partial(_ordered, ranks, False)),
        Other(f"{usual} of a reversed array", "the last of them", partial(_ordered, ranks, True)),
    )
    return Tie(partial(_count, ranks), torchs, others, remedy)


def _selects(jaxs: str, extreme: Callable[..., Tensor], torchs: str, remedy: str) -> Tie:
    """Return the tie of one number, the largest or the smallest."""
    by = partial(_extreme, descending=jaxs == "max")
    usual = f"jnp.take_along_axis with jnp.arg{jaxs}"
    along = Other(f"jnp.{jaxs}(x, axis)", _SHARES, partial(_shared, extreme))
    return _ranked(by, torchs, usual, remedy, *([along] if torchs != _SHARES else []))


# --- running maxima -------------------------------------------------------------------------------


def _in_pairs(larger: Callable[..., Tensor], x: Tensor) -> Tensor:
    """Return the running maxima along axis 0 as `jax.lax.associative_scan` adds them up."""
    if len(x) < 2:
        return x
    odd = _in_pairs(larger, larger(x[:-1:2], x[1::2]))
    even = torch.cat([x[:1], larger(odd[: (len(x) - 1) // 2], x[2::2])])
    both = x.new_empty(x.shape)
    both[::2], both[1::2] = even, odd
    return both


def _one_by_one(larger: Callable[..., Tensor], x: Tensor) -> Tensor:
    return torch.stack(list(accumulate(x.unbind(), larger)))


def _kept_first(larger: Callable[..., Tensor], x: Tensor) -> Tensor:
    first = torch.ge if larger is torch.maximum else torch.le
    return _one_by_one(lambda a, b: torch.where(first(a, b), a, b), x)


def _running(jaxs: str, larger: Callable[..., Tensor]) -> Tie:
    def result(steps: Callable[..., Tensor], own: Any, x: Tensor, dim: int) -> Any:
        return type(own)((steps(larger, x.movedim(dim, 0)).movedim(0, dim), own[1]))

    def count(x: Tensor, dim: int) -> tuple[int, int]:
        if not x.ndim:
            return 0, 0
        of = torch.cummax if larger is torch.maximum else torch.cummin
        before = of(x, dim).values.movedim(dim, 0)[:-1]
        return int((before == x.movedim(dim, 0)[1:]).sum()), x.numel()

    others = (
        Other(f"jax.lax.{jaxs}", "them by halves, in pairs", partial(result, _in_pairs)),
        Other(f"jnp.{larger.__name__}.accumulate", _HALVES, partial(result, _one_by_one)),
        Other("jnp.take_along_axis with the first index", _ONE, partial(result, _kept_first)),
    )
    remedy = "jnp.take_along_axis with the last index of each running extreme has torch's"
    return Tie(count, "the last of them", others, remedy)


# --- the larger of two ----------------------------------------------------------------------------


def _two(jaxs: str, torchs: str = _HALVES) -> Tie:
    """Return the tie of the larger, or the smaller, of two tensors."""
    is_larger = jaxs == "maximum"
    first, second = (torch.ge, torch.gt) if is_larger else (torch.le, torch.lt)

    def count(x: Tensor, y: Tensor, *_: Any) -> tuple[int, int]:
        equal = x == y
        return int(equal.sum()), equal.numel()

    def taken(is_first: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda own, x, y, **_: torch.where(is_first(x, y), x, y)

    def halves(own: Any, x: Tensor, y: Tensor, **_: Any) -> Tensor:
        return (torch.maximum if is_larger else torch.minimum)(x, y)

    sign = ">" if is_larger else "<"
    both = Other(f"jnp.{jaxs}(x, y)", _HALVES, halves)
    to_first = Other(f"jnp.where(x {sign}= y, x, y)", "the first", taken(first))
    to_second = Other(f"jnp.where(x {sign} y, x, y)", "the second", taken(second))
    own = both if torchs == _HALVES else to_first
    others = tuple(other for other in (both, to_second, to_first) if other is not own)
    return Tie(count, torchs, others, f"{own.usual} has torch's")


# --- pools ----------------------------------------------------------------------------------------


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
        return [given] * ndim if isinstance(given, int) else [*given] * (ndim // len(given))

    ndim = x.ndim - 2
    sizes, pads = each(kernel), each(padding)
    if ndim < 1 or max(each(dilation)) > 1:
        return None
    around = [pad for pad in reversed(pads) for _ in range(2)]
    first, x = x.ndim - ndim, torch.nn.functional.pad(x, around, value=-torch.inf)
    for axis, (size, step) in enumerate(zip(sizes, each(stride) if stride else sizes, strict=True)):
        if size > x.shape[first + axis]:
            return None  # one of ceil_mode's
        x = x.unfold(first + axis, size, step)
    return x.flatten(first + ndim)


def _adaptive(x: Tensor, size: Any) -> Tensor | None:
    """Return the windows of an adaptive pool, if they are all of one size."""
    lengths = x.shape[2:]
    given = [size] * len(lengths) if isinstance(size, int) else size
    sizes = [one or length for one, length in zip(given, lengths, strict=True)]
    if any(length % one for one, length in zip(sizes, lengths, strict=True)):
        return None
    return _windows(x, [length // one for one, length in zip(sizes, lengths, strict=True)])


def _pool(windows_of: Callable[..., Tensor | None], remedy: str) -> Tie:
    def count(x: Tensor, *args: Any, **named: Any) -> tuple[int, int]:
        windows = windows_of(x, *args, **named)
        return (0, 0) if windows is None else _count(_largest, windows, -1)

    def pooled(own: Any, x: Tensor, *args: Any, **named: Any) -> Any:
        named.pop("return_indices", None)
        windows = windows_of(x, *args, **named) if isinstance(own, Tensor) else None
        shape = None if windows is None else windows.shape[:-1]
        return own if windows is None or shape != own.shape else windows.amax(-1)

    other = Other("jnp.max of a reshaped array", _SHARES, pooled)
    return Tie(count, _ONE, (other,), remedy)


# --- the table ------------------------------------------------------------------------------------

_largest, _smallest = (partial(_extreme, descending=largest) for largest in (True, False))
_ANY = "torch defines no order of equal numbers here, so inputs without them show the rest alone"
_SORTED = f"jnp.argsort(x, stable=True) takes them in order; {_ANY} unless it is told stable=True"
_EITHER = "one of them along an axis, and to all of them without"


def _along_or_all(jaxs: str) -> str:
    by_index = f"jnp.take_along_axis with jnp.arg{jaxs}"
    return f"{by_index}, or jnp.{jaxs}(x) of all numbers, has torch's"


TIES = {
    "adaptive_max_pool2d": _pool(_adaptive, "flax.linen.max_pool has torch's"),
    "adaptive_max_pool3d": _pool(_adaptive, "flax.linen.max_pool has torch's"),
    "amax": _selects("max", torch.amax, _SHARES, "jnp.max(x, axis) has torch's"),
    "amin": _selects("min", torch.amin, _SHARES, "jnp.min(x, axis) has torch's"),
    "argmax": _ranked(_largest, "one of them", "jnp.argmax", _ANY),
    "argmin": _ranked(_smallest, "one of them", "jnp.argmin", _ANY),
    "cummax": _running("cummax", torch.maximum),
    "cummin": _running("cummin", torch.minimum),
    "fmax": _two("maximum", "the first"),
    "fmin": _two("minimum", "the first"),
    "kthvalue": _ranked(_kthvalue, "one of them", "jnp.sort", _ANY),
    "max": _selects("max", torch.amax, _EITHER, _along_or_all("max")),
    "max_pool2d_with_indices": _pool(_windows, "flax.linen.max_pool has torch's"),
    "max_pool3d_with_indices": _pool(_windows, "flax.linen.max_pool has torch's"),
    "maximum": _two("maximum"),
    "median": _ranked(_median, _EITHER, "jnp.sort", _ANY),
    "min": _selects("min", torch.amin, _EITHER, _along_or_all("min")),
    "minimum": _two("minimum"),
    "sort": _ranked(_sort, "them in some order", "jnp.sort", _SORTED),
    "topk": _ranked(_topk, "some of them", "jax.lax.top_k", _ANY),
}
"""Operator -> its tie."""
