"""Bugs of masks, and of the softmax over masked scores."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jax_attn.parity.bugs import FILL, softmax
from jax_attn.parity.bugs.bug import (
    Bug,
    Change,
    OperatorCall,
    is_number,
    result,
)
from jax_attn.parity.bugs.views import views

_AFTER = "mask (after the softmax)"


class Masked:
    """Scores, and which of them are hidden, for any operation that hides them."""

    def __init__(self, scores: Tensor, hidden: Tensor, fill: float):
        self.scores, self.fill = scores, fill
        self.hidden = hidden.expand(torch.broadcast_shapes(scores.shape, hidden.shape))

    def with_hidden(self, hidden: Tensor) -> Tensor:
        """Return the scores with others hidden."""
        return self.scores.expand(self.hidden.shape).masked_fill(hidden, self.fill)

    def added(self, number: float) -> Tensor:
        """Return the scores with a number added where they are hidden."""
        return self.scores + number * self.hidden


def masked(call: OperatorCall) -> Masked | None:
    """Return what a call hides; None if it hides nothing or all, or has no axis of queries."""
    found = _parts(call)
    if found is None or found.hidden.ndim < 2 or not found.hidden.any() or found.hidden.all():
        return None
    return found


def _parts(call: OperatorCall) -> Masked | None:
    args: tuple[Any, ...] = call.args
    if call.name == "masked_fill" and args[0].ndim:
        return Masked(args[0], args[1], float(args[2]))
    if call.name == "where" and len(args) == 3:
        for scores, fill, hidden in ((args[1], args[2], ~args[0]), (args[2], args[1], args[0])):
            constant = is_number(fill) or (
                isinstance(fill, Tensor) and fill.numel() > 0 and bool((fill == fill.min()).all())
            )
            if constant and isinstance(scores, Tensor) and scores.ndim > 1:
                value = float(fill.min()) if isinstance(fill, Tensor) else float(fill)
                return Masked(scores, hidden, value) if abs(value) >= FILL else None
    if call.name == "add" and all(isinstance(x, Tensor) for x in args[:2]):
        for scores, mask in (args[:2], args[1::-1]):
            if mask.ndim > 1 and mask.is_floating_point() and bool((mask <= -FILL).any()):
                rest = torch.where(mask <= -FILL, 0.0, mask)
                return Masked(scores + rest, mask <= -FILL, float(mask.min()))
    return None


def _later(hidden: Tensor) -> Tensor:
    """Return True for keys after the query's own position; the last query is at the last key."""
    queries, keys = hidden.shape[-2:]
    return torch.ones(queries, keys, dtype=torch.bool).triu(keys - queries + 1)


def _other_corner(hidden: Tensor) -> Tensor:
    """Return what a causal mask hides that is aligned to the other corner; itself if T = S."""
    upper = torch.ones(hidden.shape[-2:], dtype=torch.bool).triu(1).expand(hidden.shape)
    if hidden.shape[-1] == hidden.shape[-2]:
        return hidden
    return _later(hidden).expand(hidden.shape) if torch.equal(hidden, upper) else upper


def _one_later(hidden: Tensor) -> Tensor:
    """Move what each query sees one key to the right; the first key stays as it is."""
    return torch.cat((hidden[..., :1], hidden[..., :-1]), -1)


def _padding_or_causal(hidden: Tensor) -> Tensor:
    """Hide what both a causal mask and the padding hide; the last query sees all real keys."""
    return _later(hidden) & hidden[..., -1:, :]


def _padding(hidden: Tensor) -> Tensor:
    """Return the keys that no query sees."""
    return hidden.all(-2, keepdim=True).expand(hidden.shape)


def _distance(hidden: Tensor) -> Tensor:
    """Return key position minus query position, (T, S); the last query is at the last key."""
    queries, keys = hidden.shape[-2:]
    return torch.arange(keys) - torch.arange(keys - queries, keys)[:, None]


def _seen(hidden: Tensor) -> Tensor:
    """Return the distances that are visible in any row of the batch, in any head."""
    distance = _distance(hidden)
    return distance[~hidden.flatten(0, -3).all(0)] if hidden.ndim > 2 else distance[~hidden]


def _edge(change: int, hidden: Tensor, *, last: bool) -> Tensor:
    """Change the last or first visible distance by one; padding stays hidden."""
    distance, seen = _distance(hidden), _seen(hidden)
    edge = int(seen.max() if last else seen.min())
    outwards = (change > 0) == last
    if outwards:
        return hidden & ((distance != edge + change) | _padding(hidden))
    return hidden | (distance == edge)


HIDDEN: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "mask (ignored)": ("no mask", torch.zeros_like),
    "mask (polarity)": ("the mask inverted", torch.logical_not),
    "mask (first row of the batch)": (
        "the mask of the first row of the batch in every row",
        lambda hidden: hidden[:1].expand(hidden.shape),
    ),
    "mask (first head)": (
        "the mask of the first head in every head",
        lambda hidden: hidden[:, :1].expand(hidden.shape) if hidden.ndim > 2 else hidden,
    ),
    "mask (first query)": (
        "the mask of the first query for every query",
        lambda hidden: hidden[..., :1, :].expand(hidden.shape),
    ),
    "mask (transposed)": (
        "the mask with queries and keys exchanged",
        lambda hidden: hidden.mT if hidden.shape[-1] == hidden.shape[-2] else hidden,
    ),
    "mask (padding ignored)": (
        "a mask without the padding",
        lambda hidden: hidden.all(0, keepdim=True).expand(hidden.shape),
    ),
    "causal (ignored)": (
        "no causal mask",
        lambda hidden: (hidden & ~_later(hidden)) | _padding(hidden),
    ),
    "mask (only padding)": ("only the keys hidden that no query sees", _padding),
    "causal (where there is none)": (
        "a causal mask, too",
        lambda hidden: hidden | _later(hidden),
    ),
    "causal (the next key too)": (
        "one more visible key after each query",
        partial(_edge, 1, last=True),
    ),
    "causal (not the own key)": (
        "the last key of each query hidden",
        partial(_edge, -1, last=True),
    ),
    "causal (the other corner)": (
        "a causal mask aligned to the other corner",
        _other_corner,
    ),
    "mask (one key later)": ("every visible key one key later", _one_later),
    "mask (padding or causal)": (
        "only the keys hidden that both the padding and a causal mask hide",
        _padding_or_causal,
    ),
    "window (one key longer)": (
        "a window one key longer",
        partial(_edge, -1, last=False),
    ),
    "window (one key shorter)": (
        "a window one key shorter",
        partial(_edge, 1, last=False),
    ),
    "window (ignored)": (
        "a causal mask without its window",
        lambda hidden: _later(hidden) | _padding(hidden),
    ),
}
"""Name -> (the words after "with", the function that returns other hidden keys)."""

_MOST_WINDOWS = 64


def _windowed(size: int, hidden: Tensor) -> Tensor:
    return hidden | (_distance(hidden) <= -size)


_ADDED = (-1e9, -1e4, -1e3, -100.0, -10.0)


def hidden_keys(call: OperatorCall) -> Iterator[Bug]:
    """Yield other masks in place of this one."""
    found = masked(call)
    if found is None:
        return
    for name, (says, change) in HIDDEN.items():
        if not torch.equal(change(found.hidden), found.hidden):
            yield Bug(name, says, _with_hidden(change))
    # A window one key shorter has its name above.
    for size in range(1, min(_MOST_WINDOWS, -int(_seen(found.hidden).min()))):
        change = partial(_windowed, size)
        yield Bug("window", f"a window of {size} keys", _with_hidden(change), size)
    for number in _ADDED:
        yield Bug(
            "mask (added)",
            f"{number:g} added to the scores of hidden keys in place of a mask's fill",
            _added(number),
            number,
        )
    yield Bug(_AFTER, "the mask multiplied after the softmax", _remember)


def fitted_mask(ours: np.ndarray, theirs: np.ndarray, shape: tuple[int, ...]) -> Iterator[Bug]:
    """Yield the port's own mask, if the reference hides nothing.

    ours, theirs: the wrong tensor on both sides, in the port's shape. shape: the reference's.
    """
    hidden = np.isneginf(ours)
    if not hidden.any() or hidden.all() or not np.isfinite(theirs).all():
        return
    says = f"a mask (it has none) that hides {hidden.sum():,} of {hidden.size:,} scores"
    for view in views(hidden.shape, shape):
        if view.is_plain:
            fill = partial(_filled, torch.from_numpy(np.ascontiguousarray(view.of(hidden))))
            yield Bug("mask (where there is none)", says, result(fill))


def _filled(hidden: Tensor, scores: Tensor) -> Tensor:
    return scores.masked_fill(hidden, -torch.inf)


def _masked(change: Callable[[Masked], Tensor]) -> Change:
    """Return a change of what a call hides; a call that no longer hides anything stays as it is."""

    def changed(call: OperatorCall) -> Tensor:
        found = _parts(call)
        return call.result() if found is None else change(found)

    return changed


def _with_hidden(change: Callable[[Tensor], Tensor]) -> Change:
    return _masked(lambda found: found.with_hidden(change(found.hidden)))


def _added(number: float) -> Change:
    return _masked(lambda found: found.added(number))


def _remember(call: OperatorCall) -> Tensor:
    found = _parts(call)
    if found is None:
        return call.result()
    call.memory[_AFTER] = found.hidden
    return found.scores.expand(found.hidden.shape).clone()


def softmaxes(call: OperatorCall) -> Iterator[Bug]:
    """Yield other weights in place of a softmax over the keys."""
    scores, axis = call.args[:2]
    empty = (scores <= -FILL).all(axis, keepdim=True)
    if empty.any():
        # A row that holds only a finite fill weighs every key alike.
        rows = {"zeros": 0.0, "NaN": torch.nan, "the mean of every key": 1 / scores.shape[axis]}
        for name, number in rows.items():
            yield Bug(
                f"mask (empty row: {name})",
                f"{name} where a row sees no key",
                result(partial(torch.Tensor.masked_fill, mask=empty, value=number)),
            )
    if scores.ndim > 1 and scores.shape[-1] == scores.shape[-2]:
        over_queries = partial(softmax.over_queries, scores, axis)
        yield Bug(
            "softmax (over the queries)", softmax.OVER_QUERIES.says, lambda call: over_queries()
        )
    yield Bug(
        "softmax (left out)", "the scores themselves as weights", lambda call: call.args[0].clone()
    )
    yield Bug(_AFTER, "the mask multiplied after the softmax", _after)


def empty_rows_replaced(call: OperatorCall) -> Iterator[Bug]:
    """Yield no gradient for rows that weigh every key alike, as where every score is replaced."""
    weights, axis = call.args[1:3]
    least, most = weights.amin(axis, keepdim=True), weights.amax(axis, keepdim=True)
    empty = (least == most) & (weights.shape[axis] > 1)
    if empty.any():
        says = "no gradient of the scores of a row that sees no key, because a mask replaces them"
        change = result(partial(torch.Tensor.masked_fill, mask=empty, value=0.0))
        yield Bug("mask (empty row: replaced)", f"{says} in place of being added", change)


def empty_rows_added(call: OperatorCall) -> Iterator[Bug]:
    """Yield a gradient for the scores of a row that sees no key, as where a mask is added."""
    if not call.is_backward:
        return
    shown = _shown(call)
    if shown is None:
        return
    gradient, hidden = shown
    empty = hidden.all(-1, keepdim=True) & torch.ones_like(hidden)
    if empty.any():
        says = "a gradient of the scores of a row that sees no key, because a mask is added"
        yield Bug(
            "mask (empty row: added)",
            f"{says} in place of replacing them",
            result(lambda right: torch.where(empty, gradient, right)),
        )


def _shown(call: OperatorCall) -> tuple[Tensor, Tensor] | None:
    """Return a gradient that a call sets to 0 in places, and these places; None if it does not."""
    args: tuple[Any, ...] = call.args
    if call.name == "masked_fill" and args[0].ndim > 1 and float(args[2]) == 0.0:
        return args[0], args[1].expand(args[0].shape)
    if call.name == "where" and len(args) == 3:
        for gradient, zero, hidden in ((args[1], args[2], ~args[0]), (args[2], args[1], args[0])):
            is_zero = isinstance(zero, Tensor) and not zero.any()
            if is_zero and isinstance(gradient, Tensor) and gradient.ndim > 1 and gradient.any():
                return gradient, hidden.expand(gradient.shape)
    return None


def _after(call: OperatorCall) -> Tensor:
    """Hide keys behind the softmax, if a call before it remembers which."""
    hidden = call.memory.get(_AFTER)
    return call.result() if hidden is None else call.result().masked_fill(hidden, 0.0)
