"""Name sizes that vary, tell what became of them in the export, and write them."""

import ast
import itertools
import keyword
import linecache
from collections.abc import Mapping
from typing import Any

import sympy  # type: ignore[import-untyped]
from torch.export import Dim, ExportedProgram
from torch.fx import Node

from jax_attn.translate.tracing.export.marks import named_leaves
from jax_attn.translate.tracing.private import Guard, expression, guards, printed
from jax_attn.translate.tracing.problems import Unsupported
from jax_attn.translate.tracing.source.frames import tree_of

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
    problems: list[Unsupported] = []
    seen: dict[str, tuple[int, str]] = {}

    def refuse(place: str, reason: str) -> None:
        problems.append(Unsupported("size", place, reason))

    for name, axes in dynamic.items():
        if not hasattr(leaves.get(name), "shape"):
            known = ", ".join(each for each in leaves if hasattr(leaves[each], "shape"))
            refuse(name, f"dynamic names no tensor; the tensors are {known}")
            continue
        shape = leaves[name].shape
        for axis, size in axes.items():
            place = f"{name}, axis {axis}, size {size!r}"
            if not size.isidentifier() or keyword.iskeyword(size):
                refuse(place, "expected a name of Python")
            elif not -len(shape) <= axis < len(shape):
                refuse(place, f"the input has {len(shape)} axes, no axis {axis}")
            elif shape[axis] < 2:
                reason = f"the input has {shape[axis]} there, which torch.export takes for fixed; "
                refuse(place, reason + "translate with an input of 2 or more")
            elif seen.setdefault(size, (shape[axis], place))[0] != shape[axis]:
                other, there = seen[size]
                refuse(place, f"is {shape[axis]}, and {other} at {there}")
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


class NamedSizes:
    """Hold the named sizes of an exported program.

    Attributes:
      names: the name of each symbol of the graph.
      fixed: the sizes that the export fixed, two that it made one, and those on which Python code
        branched: one branch alone is in the graph.
      limits: sizes that torch itself refuses, or may: a table of positions that ends, a reshape in
        pairs, a check in forward that raises; each with its line.
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
        equal = [guard for guard in guards if isinstance(guard.expression, sympy.Eq)]
        # The symbol of a size that is fixed is gone; it stands in the condition that fixed it.
        reasons = [guard for guard in equal if values & set(guard.expression.args)] or [
            guard for guard in equal if guard.expression.free_symbols - set(self._symbols)
        ]
        self.fixed.append(_problem(place, held, reasons[0] if reasons else None))

    def _limit(self, guard: Guard) -> None:
        """Tell of sizes at which a condition does not hold."""
        if not guard.is_python and _is_of_layout(guard):
            return
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
                said = f"the graph is valid if {self.written(guard.expression)}, not at {example}"
                names = ", ".join(self.names[str(symbol)] for symbol in symbols)
                is_branch = guard.is_python and not _is_check(guard.file, guard.line)
                problem = _problem(names, said, guard)
                listed = self.fixed if is_branch else self.limits
                if all(
                    (each.operator, each.file, each.line) != (names, problem.file, problem.line)
                    for each in listed
                ):
                    listed.append(problem)
                return

    def written(self, size: Any) -> str:
        """Write a size of the graph as Python, in the named sizes: `B * T`, `T // 2`."""
        found = expression(size)
        if not isinstance(found, sympy.Basic):
            return repr(found)
        text = printed(found.xreplace(self._symbols))
        return ast.unparse(ast.parse(text, mode="eval"))


def _is_of_layout(guard: Guard) -> bool:
    """Return whether a condition is on memory, or sets sizes of 0 and 1 apart to broadcast them.

    Neither changes what JAX computes.
    """
    if any(word in guard.asked_by for word in _LAYOUT):
        return True
    sides = getattr(guard.expression, "args", ())
    is_bound = isinstance(guard.expression, (sympy.Ne, sympy.Gt, sympy.Ge, sympy.Lt, sympy.Le))
    return is_bound and any(side in (0, 1, 2) for side in sides)


def _is_check(file: str, line: int) -> bool:
    """Return whether a line asks whether a size is allowed: an `assert`, an `if` that raises."""
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Assert) and node.lineno <= line <= (node.end_lineno or 0):
            return True
        if isinstance(node, ast.If) and node.lineno <= line < max(
            node.body[0].lineno, node.lineno + 1
        ):
            branches = [branch for branch in (node.body, node.orelse) if branch]
            return any(isinstance(branch[-1], ast.Raise) for branch in branches)
    return False


def _problem(place: str, reason: str, guard: Guard | None) -> Unsupported:
    if guard is None or not guard.file:
        return Unsupported("size", place, reason)
    text = linecache.getline(guard.file, guard.line).strip()
    return Unsupported("size", place, reason, guard.file, guard.line, text)
