"""Bugs of convolutions, and of pooling over positions."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from jax_attn.parity.bugs.bug import Bug, OperatorCall, arguments

_STRIDE, _PADDING, _DILATION, _TRANSPOSED, _GROUPS = 3, 4, 5, 6, 8
_NUMBERS = {
    # argument -> its word, the values that are tried
    _STRIDE: ("stride", range(1, 5)),
    _PADDING: ("padding", range(5)),
    _DILATION: ("dilation", range(1, 4)),
}


def convolutions(call: OperatorCall) -> Iterator[Bug]:
    """Yield convolutions with another stride, padding or dilation, or with mixed-up groups."""
    if call.args[_TRANSPOSED]:
        return
    for at, (word, values) in _NUMBERS.items():
        own = list(call.args[at])
        for value in values:
            other = [value] * len(own)
            if other != own:
                says = f"a {word} of {value} in place of {_shown(own)}"
                yield Bug(f"convolution ({word})", says, arguments({at: other}), value)
    yield from _one_sided(call)
    if (groups := call.args[_GROUPS]) > 1:
        says = f"the channels of {groups} groups interleaved"
        yield Bug("convolution (groups)", f"{says} at its input", partial(_grouped, 0))
        yield Bug("convolution (groups)", f"{says} at its output", partial(_grouped, 1))


def _one_sided(call: OperatorCall) -> Iterator[Bug]:
    """Yield paddings with the same sum that are not the same on both sides, as of "SAME"."""
    own = list(call.args[_PADDING])
    if len(set(own)) != 1 or own[0] < 1:
        return
    both = 2 * own[0]
    for before in range(both + 1):
        if before != own[0]:
            says = (
                f"a padding of {before} before and {both - before} after in place of {own[0]} each"
            )
            yield Bug("convolution (padding)", says, partial(_padded, before, both - before))


def _padded(before: int, after: int, call: OperatorCall) -> Tensor:
    x, *others = call.args
    others[_PADDING - 1] = [0] * len(call.args[_PADDING])
    return call.with_args(functional.pad(x, (before, after) * (x.ndim - 2)), *others)


def _grouped(place: int, call: OperatorCall) -> Tensor:
    """Interleave the channels of the input, or of the result."""
    groups = call.args[_GROUPS]
    if place == 0:
        x, *others = call.args
        return call.with_args(_interleaved(x, groups), *others)
    return _interleaved(call.result(), groups)


def _interleaved(x: Tensor, groups: int) -> Tensor:
    return x.unflatten(1, (groups, -1)).transpose(1, 2).flatten(1, 2)


def _shown(numbers: Sequence[int]) -> str:
    return str(numbers[0]) if len(set(numbers)) == 1 else str(list(numbers))


def tokens(call: OperatorCall) -> Iterator[Bug]:
    """Yield another token, or the mean of all, in place of one that is taken, as a pooler does."""
    if call.name == "index":
        yield from _indexed(*call.args[:2])
        return
    if call.name == "mean":
        axes = call.args[1] if len(call.args) > 1 else None
        is_pool = call.args[0].ndim > 2 and axes is not None and len(axes) == 1
        axis, own = (axes[0], None) if is_pool and axes else (0, 0)
    else:
        _, axis, own = call.args
    x = call.args[0]
    axis %= max(x.ndim, 1)
    if x.ndim < 3 or axis != x.ndim - 2:
        return
    last = x.shape[axis] - 1
    keep = call.name == "mean" and len(call.args) > 2 and call.args[2]
    for name, index in (("first token", 0), ("last token", last)):
        if own is None or own % (last + 1) != index:
            says = f"the {name} in place of {'the mean' if own is None else 'its own'}"
            yield Bug(f"pooling ({name})", says, partial(_selected, axis, index, keep))
    if own is not None:
        says = "the mean of all tokens in place of one"
        yield Bug("pooling (mean)", says, lambda call: call.args[0].mean(axis))


def _selected(axis: int, index: int, keep: bool, call: OperatorCall) -> Tensor:
    taken = call.args[0].select(axis, index)
    return taken.unsqueeze(axis) if keep else taken


def _indexed(x: Tensor, indices: Sequence[Any]) -> Iterator[Bug]:
    """Yield the first or the last token of each row where a row has a token of its own."""
    axis = len(indices) - 1
    own = indices[axis]
    if x.ndim < 3 or axis != 1 or not isinstance(own, Tensor) or own.dtype is torch.bool:
        return
    last = x.shape[axis] - 1
    for name, index in (("first token", 0), ("last token", last)):
        other = torch.full_like(own, index)
        if not torch.equal(own % (last + 1), other):
            says = f"the {name} of each row in place of its own"
            yield Bug(f"pooling ({name})", says, arguments({1: [*indices[:axis], other]}))
