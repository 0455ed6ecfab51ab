"""Constants: tensors that depend on no floating input, parameter or buffer (masks, rotary angles).

A model in bfloat16 keeps its rotary angles in float32, so they are perturbed by roundoffs of
float32: with roundoffs of bfloat16, the budget would pass a position that is wrong by several.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from jax_attn.parity.run.modes.mode import Kwargs, Mode

Signature = tuple[str, tuple[tuple[int, ...], ...]]
"""An operator's name, and the shapes of the floating arguments of a call."""
Constants = tuple[tuple[Signature, torch.dtype | None], ...]
"""The call that makes each rounded constant, and the dtype in which it is kept, in order."""
SOFTMAXES = ("_softmax", "_safe_softmax")
_MARK = "_made_of_constants"
_PLAIN = frozenset((int, float, bool, type(None)))


def each(fn: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """Return `tree` with `fn` applied to every floating or complex tensor.

    An operator's arguments are never deep; torch's own tree_map takes as long as a small operator.
    """
    if isinstance(tree, torch.Tensor):
        return fn(tree) if tree.is_floating_point() or tree.is_complex() else tree
    if isinstance(tree, tuple | list):
        branches = [branch if type(branch) in _PLAIN else each(fn, branch) for branch in tree]
        return type(tree)(*branches) if hasattr(tree, "_fields") else type(tree)(branches)
    if isinstance(tree, dict):
        return {name: each(fn, branch) for name, branch in tree.items()}
    return tree


def sources(tree: Any) -> frozenset[int] | None:
    """Return the recorded operators that make the constants in `tree`; None if any is no constant.

    Tensors without a mark are not constants: parameters, inputs, buffers.
    """
    union: frozenset[int] = frozenset()
    for x in tensors_of(tree):
        made_by = getattr(x, _MARK, None)
        if made_by is None:
            return None
        union |= made_by
    return union


def sources_of(func: OpOverload, args: tuple, kwargs: Kwargs | None) -> frozenset[int] | None:
    """Return the `sources` of an operator's arguments; an empty set for `torch.tensor(3.5)`."""
    if func is torch.ops.aten.lift_fresh.default and not hasattr(args[0], _MARK):
        return frozenset()
    return sources((args, kwargs))


def mark(result: Any, made_by: frozenset[int] | None) -> None:
    """Mark every floating tensor in `result` with the operators that make it, for `sources`."""
    for x in tensors_of(result):
        setattr(x, _MARK, made_by)


def signature(func: OpOverload, args: tuple, kwargs: Kwargs | None) -> Signature:
    """Return a call's signature, the same for an operator and its in-place form."""
    name = func.overloadpacket.__name__.removesuffix("_")
    return name, tuple(tuple(x.shape) for x in tensors_of((args, kwargs)))


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """Return every floating or complex tensor in `tree`."""
    tensors: list[torch.Tensor] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        tensors.append(x)
        return x

    each(look, tree)
    return tensors


def storages(tree: Any) -> set[int]:
    """Return the addresses of the storages of every tensor in `tree` that has elements."""
    leaves = tree_leaves(tree)
    return {
        x.untyped_storage().data_ptr()
        for x in leaves
        if isinstance(x, torch.Tensor) and x.layout is torch.strided and x.numel()
    }


class Recorder(Mode):
    """A mode that records the operators that make rounded constants, and the dtypes of these."""

    def __init__(self, rounds: Callable[[OpOverload], bool]):
        """rounds: returns whether an operator rounds."""
        super().__init__()
        self._rounds, self._spoilt = rounds, False
        self._recorded: list[tuple[Signature, torch.dtype | None]] = []
        self.stored_softmaxes: list[bool] = []
        """For each softmax, in order, whether its scores are narrower than float32; many modules
        widen them first."""

    @property
    def constants(self) -> Constants:
        return () if self._spoilt else tuple(self._recorded)

    def dispatched(self, func: OpOverload, args: tuple, kwargs: Kwargs) -> Any:
        made_by, call = sources_of(func, args, kwargs), signature(func, args, kwargs)
        if func._schema.is_mutable and made_by is None and args[0]._is_view():
            # Neither the constant that this is a view of, nor its other views, can be determined.
            self._spoilt = self._spoilt or sources(args[0]) is not None
        result = func(*args, **kwargs)
        if call[0] in SOFTMAXES:
            self.stored_softmaxes.append(args[0].dtype in (torch.bfloat16, torch.float16))
        if made_by is not None and self._rounds(func):
            self._recorded.append((call, getattr(result, "dtype", None)))
            made_by = frozenset({len(self._recorded) - 1})
        elif made_by and isinstance(result, torch.Tensor) and result.is_floating_point():
            for i in made_by:
                kept = _coarser(self._recorded[i][1], result.dtype)
                self._recorded[i] = self._recorded[i][0], kept
        mark(result, made_by)
        return result


def _coarser(kept: torch.dtype | None, cast: torch.dtype) -> torch.dtype | None:
    """Return the coarser of the dtype that keeps a constant and the one that it is cast to."""
    if kept is None or not kept.is_floating_point:
        return kept
    return max(kept, cast, key=lambda dtype: torch.finfo(dtype).eps)
