"""Sizes that vary: their names, what became of them in the export, and their expressions."""

import ast
import itertools
import linecache
from collections.abc import Mapping
from typing import Any

import sympy  # type: ignore[import-untyped]
from torch.export import Dim, ExportedProgram
from torch.fx import Node

from jax_attn.translate.marks import named_leaves
from jax_attn.translate.private import Guard, expression, guards, printed
from jax_attn.translate.problems import Unsupported

Dynamic = Mapping[str, Mapping[int, str]]

# Sizes at which a condition of the export is tried, smaller and larger than what is traced.
_TRIED = (2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 16, 31, 32, 64, 101, 128, 1023, 4096)
# Conditions on the layout in memory, which JAX does not have.
_LAYOUT = ("contiguous", "strides", "is_non_overlapping")


def size_problems(arguments: Mapping[str, Any], dynamic: Dynamic) -> list[Unsupported]:
    """Return what is wrong with the names of sizes, by the inputs alone."""
    leaves = {
        name: value for key, tree in arguments.items() for name, value in named_leaves(key, tree)
    }
    problems = []
    seen: dict[str, tuple[int, str]] = {}
    for name, axes in dynamic.items():
        if not hasattr(leaves.get(name), "shape"):
            known = ", ".join(each for each in leaves if hasattr(leaves[each], "shape"))
            problems.append(
                Unsupported("size", name, f"dynamic names no tensor; the tensors are {known}")
            )
            continue
        shape = leaves[name].shape
        for axis, size in axes.items():
            place = f"{name}, axis {axis}, size {size!r}"
            if not size.isidentifier():
                problems.append(Unsupported("size", place, "expected a name of Python"))
            elif not -len(shape) <= axis < len(shape):
                problems.append(
                    Unsupported("size", place, f"the input has {len(shape)} axes, no axis {axis}")
                )
            elif shape[axis] < 2:
                problems.append(
                    Unsupported(
                        "size",
                        place,
                        f"the input has {shape[axis]} there, which torch.export takes for fixed; "
                        "translate with an input of 2 or more",
                    )
                )
            elif seen.setdefault(size, (shape[axis], place))[0] != shape[axis]:
                other, there = seen[size]
                problems.append(
                    Unsupported("size", place, f"is {shape[axis]}, and {other} at {there}")
                )
    return problems


def shapes_of(arguments: Mapping[str, Any], dynamic: Dynamic) -> dict[str, Any]:
    """Return the `dynamic_shapes` of torch.export for arguments: every named axis is free."""

    def tree(name: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: tree(f"{name}_{key}", each) for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)([tree(f"{name}_{i}", each) for i, each in enumerate(value)])
        if not hasattr(value, "shape"):
            return None
        return {axis % len(value.shape): Dim.AUTO for axis in dynamic.get(name, {})}

    return {name: tree(name, value) for name, value in arguments.items()}


class Sizes:
    """The named sizes of an exported program.

    Attributes:
      names: the name of each symbol of the graph.
      fixed: the sizes that the export fixed, or two of which it made one.
      limits: the sizes for which alone the export is valid, each with the line that says so.
    """

    def __init__(
        self, program: ExportedProgram, given: Mapping[str, Node], dynamic: Dynamic
    ) -> None:
        self.names: dict[str, str] = {}
        self.fixed: list[Unsupported] = []
        self.limits: list[Unsupported] = []
        self._symbols: dict[Any, Any] = {}
        conditions = guards(program) if dynamic else []
        for name, axes in dynamic.items():
            for axis, size in axes.items():
                self._name(
                    size, f"{name}, axis {axis}, size {size!r}", given[name], axis, conditions
                )
        for condition in conditions:
            self._limit(condition)

    def _name(self, size: str, place: str, node: Node, axis: int, guards: list[Guard]) -> None:
        symbol = expression(node.meta["val"].shape[axis])
        if not isinstance(symbol, sympy.Symbol):
            held = f"the export fixed it to {symbol}"
            values = {symbol}
        elif self.names.setdefault(str(symbol), size) != size:
            held = f"the export made it one with {self.names[str(symbol)]!r}"
            values = {symbol}
        else:
            self._symbols[symbol] = sympy.Symbol(size, integer=True, positive=True)
            return
        reasons = [
            guard
            for guard in guards
            if isinstance(guard.expression, sympy.Eq) and values & set(guard.expression.args)
        ]
        guard = reasons[0] if reasons else None
        self.fixed.append(_problem(place, held, guard))

    def _limit(self, guard: Guard) -> None:
        """Tell of sizes at which a condition does not hold."""
        symbols = sorted(guard.expression.free_symbols & set(self._symbols), key=str)
        if not symbols or guard.expression.free_symbols - set(symbols):
            return
        tried = _TRIED if len(symbols) < 3 else _TRIED[::4]
        for values in itertools.product(tried, repeat=len(symbols)):
            if guard.expression.subs(dict(zip(symbols, values, strict=True))) == sympy.false:
                example = ", ".join(
                    f"{self.names[str(symbol)]} = {value}"
                    for symbol, value in zip(symbols, values, strict=True)
                )
                said = f"holds for {self.written(guard.expression)} only, not for {example}"
                names = ", ".join(self.names[str(symbol)] for symbol in symbols)
                self.limits.append(_problem(names, said, guard))
                return

    def written(self, size: Any) -> str:
        """Write a size of the graph as Python, in the named sizes: `B * T`, `T // 2`."""
        found = expression(size)
        if not isinstance(found, sympy.Basic):
            return repr(found)
        text = printed(found.xreplace(self._symbols))
        return ast.unparse(ast.parse(text, mode="eval"))


def _problem(place: str, reason: str, guard: Guard | None) -> Unsupported:
    if guard is None or not guard.file:
        return Unsupported("size", place, reason)
    text = linecache.getline(guard.file, guard.line).strip()
    return Unsupported("size", place, reason, guard.file, guard.line, text)
