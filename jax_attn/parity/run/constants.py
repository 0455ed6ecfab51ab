"""What a torch module makes of no floating input, parameter or buffer: masks, angles of positions.

A model in bfloat16 keeps its rotary angles in float32. They round as they are kept: were they
moved by a roundoff of bfloat16, a budget would let pass a position that is wrong by several.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Identity = tuple[str, tuple[tuple[int, ...], ...]]
Made = tuple[tuple[Identity, torch.dtype | None], ...]
_MARK = "_made_of_constants"
_PLAIN = frozenset((int, float, bool, type(None)))


def each(fn: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """`tree` with fn of every floating tensor: an operator's arguments are never deep.

    torch's own tree_map takes as long as these small operators do.
    """
    if isinstance(tree, torch.Tensor):
        return fn(tree) if tree.is_floating_point() else tree
    if isinstance(tree, tuple | list):
        made = [branch if type(branch) in _PLAIN else each(fn, branch) for branch in tree]
        return type(tree)(*made) if hasattr(tree, "_fields") else type(tree)(made)
    if isinstance(tree, dict):
        return {name: each(fn, branch) for name, branch in tree.items()}
    return tree


def roundings(tree: Any) -> frozenset[int] | None:
    """Which recorded operators the constants in `tree` come from; None where not all are constants.

    What is not marked is none: parameters, inputs, buffers.
    """
    found: list[frozenset[int] | None] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        found.append(getattr(x, _MARK, None))
        return x

    each(look, tree)
    return None if None in found else frozenset().union(*found)


def mark(result: Any, made: frozenset[int] | None) -> None:
    """Say of every floating tensor in `result` what it comes from, as `roundings` tells it."""

    def say(x: torch.Tensor) -> torch.Tensor:
        setattr(x, _MARK, made)
        return x

    each(say, result)


def identity(func, args, kwargs) -> Identity:
    """An operator's name, and the shapes of its floating arguments."""
    shapes: list[tuple[int, ...]] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(x.shape))
        return x

    each(look, (args, kwargs))
    return func.overloadpacket.__name__, tuple(shapes)


class Recorded(TorchDispatchMode):
    """Which operators made constants that round, and in which dtype they are kept, in order."""

    def __init__(self, rounds: Callable[[Any], bool]):
        """rounds: whether an operator does."""
        super().__init__()
        self._rounds, self._spoilt = rounds, False
        self._made: list[tuple[Identity, torch.dtype | None]] = []

    @property
    def made(self) -> Made:
        return () if self._spoilt else tuple(self._made)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        made, given = roundings((args, kwargs)), identity(func, args, kwargs)
        if func._schema.is_mutable and made is None and args[0]._is_view():
            # Of which constant it is a view, and which others there are, cannot be told.
            self._spoilt = self._spoilt or roundings(args[0]) is not None
        result = func(*args, **kwargs)
        if made is not None and self._rounds(func):
            self._made.append((given, getattr(result, "dtype", None)))
            made = frozenset({len(self._made) - 1})
        elif made and isinstance(result, torch.Tensor) and result.is_floating_point():
            for i in made:
                self._made[i] = self._made[i][0], _coarser(self._made[i][1], result.dtype)
        mark(result, made)
        return result


def _coarser(kept: torch.dtype | None, cast: torch.dtype) -> torch.dtype | None:
    """The dtype that a constant is known in, once it was cast."""
    if kept is None or not kept.is_floating_point:
        return kept
    return max(kept, cast, key=lambda dtype: torch.finfo(dtype).eps)
