"""What a torch module makes of no floating input and no parameter: tables, masks, angles.

A model in bfloat16 keeps its rotary angles in float32. They round as they are kept: were they
moved by a roundoff of bfloat16, a budget would let pass a position that is wrong by several.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Made = tuple[tuple[str, torch.dtype], ...]
_MARK = "_made_of_constants"


def each(fn: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """`tree` with fn of every floating tensor: an operator's arguments are never deep.

    torch's own tree_map takes as long as these small operators do.
    """
    if isinstance(tree, torch.Tensor):
        return fn(tree) if tree.is_floating_point() else tree
    if isinstance(tree, tuple | list):
        made = [each(fn, branch) for branch in tree]
        return type(tree)(*made) if hasattr(tree, "_fields") else type(tree)(made)
    if isinstance(tree, dict):
        return {name: each(fn, branch) for name, branch in tree.items()}
    return tree


def all_constant(*arguments: Any) -> bool:
    """Whether every floating tensor among an operator's arguments is marked as a constant."""
    found: list[bool] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        found.append(getattr(x, _MARK, False))
        return x

    each(look, arguments)
    return all(found)


def mark(result: Any, *, constant: bool) -> None:
    """Say of every floating tensor in `result` whether it is a constant."""

    def say(x: torch.Tensor) -> torch.Tensor:
        setattr(x, _MARK, constant)
        return x

    each(say, result)


class Recorded(TorchDispatchMode):
    """Which operators made constants that round, and in which dtype they are kept, in order."""

    def __init__(self, rounds: Callable[[Any], bool]):
        """rounds: whether an operator does."""
        super().__init__()
        self._rounds, self._made = rounds, []

    @property
    def made(self) -> Made:
        return tuple(self._made)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        constant = all_constant(args, kwargs)
        result = func(*args, **kwargs)
        mark(result, constant=constant)
        if constant and self._rounds(func) and isinstance(result, torch.Tensor):
            self._made.append((func.overloadpacket.__name__, result.dtype))
        return result
