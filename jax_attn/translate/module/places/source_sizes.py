"""Read sizes as torch's source writes them: `x.view(batch, heads * times, length, width)`."""

import ast
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from jax_attn.translate.rules.expression import Written
from jax_attn.translate.tracing.calls import ModuleCall
from jax_attn.translate.tracing.private import expression
from jax_attn.translate.tracing.source.source_lines import shape_names, source_of

_RESHAPES = ("view", "reshape", "expand")


class _Shaped:
    """Stand for a tensor of which only the shape is asked."""

    def __init__(self, shape: tuple[Any, ...]) -> None:
        self.shape = shape

    def size(self, axis: int | None = None) -> Any:
        return self.shape if axis is None else self.shape[axis]


class SourceSizes:
    """Read what the source of a function says of sizes, and what these are in each call.

    Attributes:
      names: the names that it gives to sizes of its arguments, by argument and axis.

    Args:
      calls: the calls; all have the same arguments.
    """

    def __init__(self, calls: Sequence[ModuleCall]) -> None:
        self.calls = calls
        self.forward = calls[0].forward
        self.names = {name: place for place, name in shape_names(self.forward).items()}
        self.known = [self._known(call) for call in calls]

    def _known(self, call: ModuleCall) -> dict[str, Any]:
        known: dict[str, Any] = {
            name: value for name, value in call.arguments.items() if type(value) is int
        }
        for name, node in call.given.items():
            if isinstance(node.meta["val"], torch.Tensor):
                known[name] = _Shaped(tuple(node.meta["val"].shape))
        for name, (argument, axis) in self.names.items():
            if isinstance(known.get(argument), _Shaped):
                known[name] = known[argument].shape[axis]
        return known

    def values(self, text: str) -> list[Any] | None:
        """Evaluate an expression of the source in each call, if it says nothing but sizes."""
        try:
            return [eval(text, {"__builtins__": {}}, known) for known in self.known]
        except Exception:  # what the expression reads is no size
            return None

    def have(self, text: str, sizes: Sequence[Any]) -> bool:
        """Return whether an expression has these sizes in the calls."""
        values = self.values(text)
        return values is not None and all(map(_is_equal, values, sizes))

    def reshaped(self, sizes: Sequence[Any]) -> list[Written | None] | None:
        """Return what the source writes in a reshape to these sizes; None in the place of numbers.

        Returns None if there is no such reshape in the source.
        """
        for written in _reshapes(self.forward):
            if len(written) != len(sizes):
                continue
            texts = map(ast.unparse, written)
            if all(
                self.have(text, [size] * len(self.calls))
                for text, size in zip(texts, sizes, strict=True)
            ):
                return [None if isinstance(each, ast.Constant) else each for each in written]
        return None

    def cut(self, size: int) -> Written | None:
        """Return the first expression of this size in the index of an array in the source."""
        for each in _cuts(self.forward):
            is_number = isinstance(each, ast.Constant)
            if not is_number and self.have(ast.unparse(each), [size] * len(self.calls)):
                return each
        return None

    def size(self, values: Sequence[Any]) -> str | None:
        """Write sizes, one of each call: an argument that is a number, or an axis of an array."""
        texts = [name for name, each in self.calls[0].arguments.items() if type(each) is int]
        for name, node in self.calls[0].given.items():
            texts += [f"{name}.shape[{axis}]" for axis in reversed(range(node.meta["val"].ndim))]
        return next((text for text in texts if self.have(text, values)), None)


def _is_equal(value: Any, size: Any) -> bool:
    """Return whether two sizes are one number, or vary as one; a symbol is not compared itself."""
    if isinstance(value, torch.SymInt) and isinstance(size, torch.SymInt):
        return bool(expression(value) == expression(size))
    return type(value) is int and type(size) is int and value == size


def _reshapes(forward: Callable[..., Any]) -> Iterator[Sequence[ast.expr]]:
    for node in ast.walk(source_of(forward)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if node.func.attr in _RESHAPES and node.args:
            first = node.args[0]
            yield first.elts if isinstance(first, (ast.Tuple, ast.List)) else node.args


def _cuts(forward: Callable[..., Any]) -> Iterator[ast.expr]:
    for node in ast.walk(source_of(forward)):
        if isinstance(node, ast.Slice):
            yield from (each for each in (node.lower, node.upper) if each is not None)
