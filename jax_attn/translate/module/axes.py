"""Sizes that vary, as one method reads them from the shapes of its arguments."""

import ast
from dataclasses import dataclass
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch

from jax_attn.translate.rules.expression import Written, parsed
from jax_attn.translate.tracing.calls import ModuleCall
from jax_attn.translate.tracing.private import expression
from jax_attn.translate.tracing.sizes import NamedSizes


@dataclass(frozen=True)
class Axis:
    """An axis of an argument, the variable that holds its size, and the size of the graph."""

    argument: str
    axis: int
    variable: str
    size: sympy.Expr


class Axes:
    """The sizes that a method can read from its arguments, and those that it does read."""

    def __init__(self, call: ModuleCall, sizes: NamedSizes) -> None:
        self.sizes = sizes
        self.found: dict[str, Axis] = {}
        self.read: set[str] = set()
        for argument, node in call.given.items():
            for axis, size in enumerate(node.meta["val"].shape):
                if isinstance(size, torch.SymInt):
                    text = sizes.written(size)
                    variable = text if text.isidentifier() else f"{argument}_size"
                    self.found.setdefault(text, Axis(argument, axis, variable, expression(size)))

    def written(self, size: Any) -> Written | None:
        """Write a size, or return None if no argument tells it."""
        text = self.sizes.written(size)
        tree = parsed(text)
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        if names <= set(self.found):
            self.read |= names
            return tree
        if text in self.found:
            self.read.add(text)
            return ast.Name(self.found[text].variable, ast.Load())
        for known, axis in self.found.items():
            factor = axis.size / expression(size)
            if isinstance(factor, sympy.Integer):
                self.read.add(known)
                return parsed(f"{axis.variable} // {factor}")
            if isinstance(1 / factor, sympy.Integer):
                self.read.add(known)
                return parsed(f"{axis.variable} * {1 / factor}")
        return None

    def statements(self) -> list[ast.stmt]:
        """Read the sizes that are used, `B, T = x.shape[:2]`, each once."""
        by_argument: dict[str, list[Axis]] = {}
        for text, axis in self.found.items():
            if text in self.read:
                by_argument.setdefault(axis.argument, []).append(axis)
        lines: list[str] = []
        for argument, axes in by_argument.items():
            if len(axes) > 1 and [each.axis for each in axes] == list(range(len(axes))):
                names = ", ".join(each.variable for each in axes)
                lines.append(f"{names} = {argument}.shape[:{len(axes)}]")
            else:
                lines += [f"{each.variable} = {argument}.shape[{each.axis}]" for each in axes]
        return ast.parse("\n".join(lines)).body
