"""Knees and conditions: thresholds of losses, truncation, conditions that hold everywhere, and
indices that never repeat, so that a port which sets in place of adding would pass.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from jax_attn.parity.checking.canaries.side import Side, Sides, constant

_FINEST = 2.0**-24
"""float32's roundoff: a check in float32 or narrower shows no smaller difference."""


def _softplus(x: Any, beta: Any = 1.0, threshold: Any = 20.0) -> Sides:
    beyond = math.log1p(math.exp(-threshold)) if threshold < 700 else 0.0
    if beyond > _FINEST * abs(threshold):  # else the threshold changes nothing but rounding
        what = f"a number above {threshold / beta:g}"
        yield Side(f"softplus(threshold={threshold:g})", what), bool((x * beta > threshold).any())


def _kneed(
    operator: str, word: str, x: Any, y: Any, reduction: int = 1, knee: float = 1.0
) -> Sides:
    off = (x - y).abs()
    for side, acts in (("above", off > knee), ("below", off < knee)):
        if knee > 0 and off.numel():
            what = f"a difference {side} {knee:g}"
            yield Side(f"{operator}({word}={knee:g})", what), bool(acts.any())


def _multi_margin(x: Any, target: Any, p: Any = 1, margin: Any = 1, *_: Any) -> Sides:
    rows, at = x.reshape(-1, x.shape[-1]), target.reshape(-1, 1)
    what = "a score that lies below the target's by more than the margin"
    far = margin - rows.gather(1, at) + rows < 0
    yield Side(f"multi_margin_loss(margin={margin:g})", what), bool(far.any())


def _nll(x: Any, target: Any, weight: Any = None, reduction: int = 1, ignored: int = -100) -> Sides:
    what = f"targets of which some are {ignored}"
    side = Side(f"ignore_index={ignored} of a loss", what, standing=ignored < 0)
    yield side, bool((target == ignored).any())


def _divided(x: Any, y: Any, *, rounding_mode: str | None = None) -> Sides:
    if rounding_mode is None or not isinstance(x, torch.Tensor) or x.numel() < 2:
        return
    if not (number := constant(y)):
        return
    parts = torch.remainder(x, number) != 0
    what = f"a number that {number:g} does not divide"
    yield Side(f"the rounding of a division by {number:g}", what), bool(parts.any())
    if rounding_mode == "trunc":
        is_whole = not x.is_floating_point()
        what = f"a number below 0 that {number:g} does not divide"
        side = Side(
            f"trunc in place of floor, of a division by {number:g},", what, standing=is_whole
        )
        yield side, bool((parts & (x < 0)).any())


def _compared(operator: str, x: Any, y: Any) -> Sides:
    """Yield the two sides of a comparison of integers, such as of distances with a window."""
    tensors = [a for a in (x, y) if isinstance(a, torch.Tensor) and a.numel() > 1]
    if not tensors or any(a.is_floating_point() or a.dtype is torch.bool for a in tensors):
        return
    number = constant(y) if len(tensors) == 1 else None
    if number is not None and number <= 0:
        return  # a count or an index: it is not negative
    holds = getattr(torch, operator)(x, y)
    for value, acts in ((True, holds), (False, ~holds)):
        what = f"an element where it is {value} (longer sequences, if it is of distances)"
        of = "" if number is None else f" with {number:g}"
        yield Side(f"a comparison{of} that is {not value} everywhere", what), bool(acts.any())


def _counted(x: Any, *_: Any, **__: Any) -> Sides:
    if x.dtype is torch.bool and x.numel() > 1:
        what = "elements on which the condition differs"
        yield Side("a count of where a condition holds", what), bool(x.any() and not x.all())


# --- setting in place of adding -------------------------------------------------------------------


def _added(repeats: bool, start: torch.Tensor) -> Sides:
    what = "indices of which some are equal"
    side = Side("adding, in place of setting, at indices", what, anywhere=True)
    yield side, repeats or bool((start != 0).any())


def _index_add(x: Any, dim: int, index: Any, *_: Any, **__: Any) -> Sides:
    if index.numel() > 1:
        repeats = len(index.unique()) < index.numel()
        yield from _added(repeats, x.index_select(dim, index.reshape(-1)))


def _scatter_add(x: Any, dim: int, index: Any, *_: Any, **__: Any) -> Sides:
    if index.ndim and index.shape[dim] > 1 and index.numel():
        ordered = index.sort(dim).values
        yield from _added(bool((ordered.diff(dim=dim) == 0).any()), x.gather(dim, index))


def _scatter_reduce(x: Any, dim: int, index: Any, src: Any, reduce: str, **named: Any) -> Sides:
    starts = x if named.get("include_self", True) else torch.zeros_like(x)
    for _, acts in _scatter_add(starts, dim, index):
        side = Side(f"scatter_reduce({reduce!r}), in place of setting,", "indices that are equal")
        yield side, acts


def _index_put(x: Any, indices: Any, values: Any, accumulate: bool = False, **_: Any) -> Sides:
    at = [index for index in indices if index is not None]
    if accumulate and all(index.dtype is torch.long for index in at):
        places = torch.stack([index.reshape(-1) for index in torch.broadcast_tensors(*at)])
        if places.shape[1] > 1:
            repeats = places.unique(dim=1).shape[1] < places.shape[1]
            yield from _added(repeats, x[tuple(slice(None) if i is None else i for i in indices)])


# --- rows of a table ------------------------------------------------------------------------------


def _embedding(table: Any, ids: Any, *_: Any, **__: Any) -> Sides:
    """Yield the halves of a table, one of which another device may hold."""
    in_order = ids.ndim > 0 and bool((ids.diff(dim=-1) == 1).all())
    if ids.numel() < 2 or in_order or len(table) < 4 or bool((ids == ids.flatten()[0]).all()):
        return  # positions, or types
    half = len(table) // 2
    for which, read in (("first", ids < half), ("second", ids >= half)):
        what = f"ids {'below' if which == 'first' else 'of at least'} {half}"
        yield Side(f"the {which} half of a table's rows", what, standing=True), bool(read.any())


KNEES: dict[str, Callable[..., Sides]] = {
    **{name: partial(_compared, name) for name in ("ge", "gt", "le", "lt")},
    "div": _divided,
    "embedding": _embedding,
    "floor_divide": lambda x, y: _divided(x, y, rounding_mode="floor"),
    "huber_loss": partial(_kneed, "huber_loss", "delta"),
    "index_add": _index_add,
    "index_put": _index_put,
    "multi_margin_loss": _multi_margin,
    "nll_loss2d_forward": _nll,
    "nll_loss_forward": _nll,
    "scatter_add": _scatter_add,
    "scatter_reduce": _scatter_reduce,
    "smooth_l1_loss": partial(_kneed, "smooth_l1_loss", "beta"),
    "softplus": _softplus,
    "sum": _counted,
}
"""Operator -> the sides of its calls."""
