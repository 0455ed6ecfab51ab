"""Bugs of the order of heads, and of rotary positions."""

import math
from collections.abc import Callable, Collection, Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor

from jax_attn.parity.bugs.bug import (
    Bug,
    Change,
    OperatorCall,
    arguments,
    is_number,
    result,
)
from jax_attn.parity.bugs.views import views

_BASES = (1e4, 1e5, 5e5, 1e6)
_MOST_ROWS = 64
_NEAR = 1e-3
"""Tolerance, as a share of the largest number, of rows for which an order is tried."""


def orders(call: OperatorCall) -> Iterator[Bug]:
    """Yield batched products whose second operand has its heads in another order."""
    many = call.args[0].shape[0]
    for heads in (many // rows for rows in range(1, many) if many % rows == 0):
        yield Bug(
            "head order (rolled)", "heads shifted by one", _second(lambda x: x.roll(1, 1), heads)
        )
        for groups in (n for n in range(2, heads) if heads % n == 0):
            yield Bug(
                "head order (tiled)",
                "key and value heads tiled in place of repeated",
                _second(partial(tiled, groups), heads),
                f"{heads // groups} heads",
            )


def joins(call: OperatorCall) -> Iterator[Bug]:
    """Yield a reshape without its transpose, as when heads are joined."""
    x = call.args[0]
    as_stored = sorted(range(x.ndim), key=lambda axis: -x.stride(axis))
    kept = x.permute(as_stored)
    if x.ndim > 2 and kept.shape != x.shape:
        yield Bug(
            "head order (not transposed)",
            "axes that are reshaped instead of transposed",
            lambda call: kept.reshape(x.shape),
        )


def packings(call: OperatorCall) -> Iterator[Bug]:
    """Yield parts of equal size, such as queries, keys and values, split head by head."""
    axis = call.args[2] if len(call.args) > 2 else 0
    parts = call.result()
    sizes = {part.shape[axis] for part in parts}
    if len(parts) < 2 or len(sizes) > 1:
        return
    (size,) = sizes
    for heads in (n for n in range(2, size + 1) if size % n == 0):
        yield Bug(
            "packed order (by head)",
            f"each part cut out of each of {heads} heads in turn",
            partial(_by_head, axis, len(parts), heads),
            f"{heads} heads",
        )


def _by_head(axis: int, parts: int, heads: int, call: OperatorCall) -> tuple[Tensor, ...]:
    cut = call.args[0].movedim(axis, -1).unflatten(-1, (heads, parts, -1))
    return tuple(part.flatten(-2).movedim(-1, axis) for part in cut.unbind(-2))


def _second(change: Callable[[Tensor], Tensor], heads: int) -> Change:
    """Return a product whose second operand (B·N, …) is changed in the shape (B, N, …)."""

    def changed(call: OperatorCall) -> Tensor:
        a, b = call.args
        return call.with_args(a, change(b.unflatten(0, (-1, heads))).reshape(b.shape))

    return changed


def tiled(groups: int, x: Tensor) -> Tensor:
    """Reorder heads from a a b b to a b a b."""
    return x.unflatten(1, (-1, groups)).transpose(1, 2).flatten(1, 2)


def rotations(call: OperatorCall) -> Iterator[Bug]:
    """Yield rotations with interleaved pairs or with the opposite angle."""
    parts = call.args[0]
    if len(parts) != 2 or parts[0].shape != parts[1].shape:
        return
    if torch.equal(parts[0], parts[1]):
        yield Bug(
            "rotary (interleaved)",
            "interleaved rotary pairs",
            lambda call: call.args[0][0].repeat_interleave(2, -1),
        )
        return
    yield Bug("rotary (interleaved)", "interleaved rotary pairs", _neighbours)
    yield Bug(
        "rotary (the other way round)",
        "a rotation by the opposite angle",
        lambda call: -call.result(),
    )


def _neighbours(call: OperatorCall) -> Tensor:
    second, first = call.args[0]  # the negated second half of x, and its first half
    x = torch.cat((first, -second), -1)
    pairs = x.unflatten(-1, (-1, 2))
    return torch.stack((-pairs[..., 1], pairs[..., 0]), -1).flatten(-2)


def angles(call: OperatorCall) -> Iterator[Bug]:
    """Yield other positions, or another base, in the product that computes rotary angles."""
    for i, x in enumerate(call.args[:2]):
        if not isinstance(x, Tensor) or x.ndim == 0 or is_number(x):
            continue
        if _are_positions(x):
            yield from _positions(x, partial(_in_place_of, i))
        elif (base := base_of(x)) is not None:
            for other in _BASES:
                if not math.isclose(other, base, rel_tol=1e-4):
                    says = f"a rotary base of {other:g} in place of {base:g}"
                    at = {i: x ** (math.log(other) / math.log(base))}
                    yield Bug("rotary (base)", says, arguments(at), other)


def _in_place_of(i: int, other: Tensor) -> Change:
    return arguments({i: other})


def casts(call: OperatorCall) -> Iterator[Bug]:
    """Yield other positions in the conversion of positions to floating-point."""
    if _are_positions(x := call.args[0].double()):
        yield from _positions(x, lambda other: result(lambda right: other.to(right.dtype)))


def _positions(x: Tensor, change: Callable[[Tensor], Change]) -> Iterator[Bug]:
    for name, says, other in (
        ("position (one too far)", "positions one too large", x + 1),
        ("position (one too near)", "positions one too small", x - 1),
        ("position (all zero)", "every position 0", x * 0),
        ("position (of the first row)", "the first row's positions in every row", _row(x)),
        ("position (counted from zero)", "positions counted from 0", _counted(x)),
    ):
        if not torch.equal(other, x):
            yield Bug(name, says, change(other))


def _are_positions(x: Tensor) -> bool:
    return (
        x.numel() > 2 and torch.equal(x, x.round()) and float(x.max()) > 1 and bool((x >= 0).all())
    )


def _row(x: Tensor) -> Tensor:
    return x[:1].expand(x.shape)


def _counted(x: Tensor) -> Tensor:
    longest = max(range(x.ndim), key=lambda axis: x.shape[axis])
    shape = [1] * x.ndim
    shape[longest] = -1
    return torch.arange(x.shape[longest], dtype=x.dtype).view(shape).expand(x.shape)


def fitted_base(ours: Tensor, theirs: Tensor) -> Iterator[Bug]:
    """Yield the base of the port's frequencies, if the wrong tensors are rotary frequencies."""
    base, other = base_of(theirs), base_of(ours)
    if base is not None and other is not None:
        says = f"a rotary base of {other:.6g} in place of {base:.6g}"
        power = math.log(other) / math.log(base)
        yield Bug("rotary (base)", says, result(lambda x: x**power), other)


def fitted_order(ours: np.ndarray, theirs: np.ndarray, sizes: Collection[int]) -> Iterator[Bug]:
    """Yield the order in which the port has the reference's numbers along one axis.

    ours, theirs: the wrong tensor on both sides, each in its own shape. sizes: the sizes of all
    axes of the reference's tensors, among them that of joined heads.
    """
    for view in views(theirs.shape, ours.shape):
        for axis, size in enumerate(ours.shape if view.is_plain else ()):
            seen = np.moveaxis(view.of(theirs), axis, 0).reshape(size, -1)
            order = _order(np.moveaxis(ours, axis, 0).reshape(size, -1), seen)
            if order is None:
                continue
            at = view.of(np.arange(theirs.size).reshape(theirs.shape))
            source = torch.from_numpy(view.back(np.take(at, order, axis)))
            are_heads = 0 < axis < ours.ndim - 1 and size * ours.shape[-1] in sizes
            shown = ", ".join(map(str, order))
            yield Bug(
                "head order (permuted)" if are_heads else "order (permuted)",
                f"axis {axis} of {list(ours.shape)} in the order {shown}",
                result(partial(_taken, source)),
                shown,
            )


def _order(ours: np.ndarray, theirs: np.ndarray) -> list[int] | None:
    """Return the permutation of rows from theirs to ours, or None if none or only a trivial one."""
    rows = len(ours)
    if not 1 < rows <= _MOST_ROWS or not (np.isfinite(ours).all() and np.isfinite(theirs).all()):
        return None
    order = np.empty(rows, int)
    order[ours.sum(1).argsort()] = theirs.sum(1).argsort()
    is_near = np.abs(ours - theirs[order]).max() <= _NEAR * np.abs(theirs).max()
    return order.tolist() if is_near and (order != np.arange(rows)).any() else None


def _taken(source: Tensor, x: Tensor) -> Tensor:
    return x.reshape(-1)[source].reshape(x.shape)


def base_of(x: Tensor) -> float | None:
    """Return the base of rotary frequencies, a geometric series from 1 down; None for others."""
    if not x.ndim:
        return None
    longest = max(range(x.ndim), key=lambda axis: x.shape[axis])
    series = x.movedim(longest, -1).reshape(-1, x.shape[longest])[0]
    if len(series) < 3 or not bool((series > 0).all()) or float(series[0]) != 1.0:
        return None
    ratio = series[1:] / series[:-1]
    # A loose tolerance suffices: a base is claimed only if the reference with it agrees.
    if not torch.allclose(ratio, ratio[:1], rtol=1e-5) or float(ratio[0]) >= 1:
        return None
    return float(ratio[0].double() ** -len(series))
