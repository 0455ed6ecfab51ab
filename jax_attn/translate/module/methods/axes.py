"""Name and write the sizes that a method reads from the shapes of its arguments."""

import ast
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch

from jax_attn.translate.rules.expression import Written, name_of, names_in, parsed, with_operands
from jax_attn.translate.rules.written import TAKEN
from jax_attn.translate.tracing.calls import ModuleCall
from jax_attn.translate.tracing.export.sizes import NamedSizes
from jax_attn.translate.tracing.private import expression
from jax_attn.translate.tracing.source.source_lines import shape_names

Place = tuple[str, int]
"""An argument and one of its axes."""
_COMMON = {
    (3, 0): "batch_size",
    (3, 1): "length",
    (3, 2): "features",
    (2, 0): "rows",
    (2, 1): "features",
}
"""Names of sizes that torch's source does not name, by the rank and the axis."""
_OF_MASKS = {(4, 0): "batch_size", (4, 2): "query_length", (4, 3): "key_length"}


@dataclass(frozen=True)
class Axis:
    """Hold an axis of an argument, the variable of its size, and the size of the graph."""

    argument: str
    axis: int
    variable: str
    size: sympy.Expr


def axis_names(
    calls: Sequence[ModuleCall], sizes_of: Callable[[ModuleCall], NamedSizes]
) -> dict[Place, str]:
    """Name the axes of arguments whose sizes differ between the calls of a class, or have no name.

    All calls get the same names, those of torch's source if it has any, so that their methods are
    one.
    """
    texts: dict[Place, set[str]] = {}
    ranks: dict[str, int] = {}
    for call in calls:
        for argument, node in call.given.items():
            shape = node.meta["val"].shape
            ranks[argument] = len(shape)
            for axis, size in enumerate(shape):
                texts.setdefault((argument, axis), set()).add(sizes_of(call).written(size))
    if not calls:
        return {}
    own = shape_names(calls[0].forward)
    known = {name for call in calls for name in sizes_of(call).names.values()}
    unfit = {*TAKEN, *ranks}
    names: dict[Place, str] = {}
    for place, different in texts.items():
        (text, *others) = sorted(different)
        if not others and ((text.isidentifier() and text not in unfit) or text.isdigit()):
            continue
        argument, axis = place
        rank = ranks[argument]
        usual = _OF_MASKS if re.search("mask|bias", argument) else _COMMON
        common = usual.get((rank, axis), f"size_of_axis_{axis}")
        tried = [
            own.get(place) or own.get((argument, axis - rank)) or common,
            f"{argument.removesuffix('_states')}_{common}",
            f"{argument}_{common}",
        ]
        taken = {*names.values(), *known, *(name for name, _ in texts)}
        names[place] = next(name for name in tried if name and name not in taken)
    return names


def shape_reads(
    axes: Iterable[tuple[str, int, str]], calls: Collection[ModuleCall] = ()
) -> list[ast.stmt]:
    """Read sizes, each an argument, an axis and a variable: `B, T = x.shape[:2]`.

    Without the `[:2]`, if the argument has two axes in all of some calls.
    """
    by_argument: dict[str, dict[int, str]] = {}
    for argument, axis, variable in axes:
        by_argument.setdefault(argument, {})[axis] = variable
    lines: list[str] = []
    for argument, variables in by_argument.items():
        ordered = sorted(variables)
        count = ordered[-1] + 1
        if len(ordered) > 1 and ordered[0] >= 0 and count <= 2 * len(ordered):
            names = ", ".join(variables.get(axis, "_") for axis in range(count))
            is_whole = calls and all(
                argument in call.given and call.given[argument].meta["val"].ndim == count
                for call in calls
            )
            lines.append(f"{names} = {argument}.shape" + ("" if is_whole else f"[:{count}]"))
        else:
            lines += [f"{variables[axis]} = {argument}.shape[{axis}]" for axis in ordered]
    return ast.parse("\n".join(lines)).body


class Axes:
    """Write the sizes that a method can read from its arguments, and keep those that it does read.

    Args:
      call: a call of the method.
      sizes: the names of the sizes that vary.
      names: the variables of axes, where they are not the names of the sizes.
    """

    def __init__(self, call: ModuleCall, sizes: NamedSizes, names: Mapping[Place, str]) -> None:
        self.sizes = sizes
        self.names = names
        self.found: dict[str, Axis] = {}
        self.read: set[str] = set()
        shapes = {argument: node.meta["val"].shape for argument, node in call.given.items()}
        places = [(name, axis) for name, shape in shapes.items() for axis in range(len(shape))]
        # Of a mask, whose last axes are lengths too, a size is read only if no other tells it.
        for argument, axis in sorted(places, key=lambda place: place[1]):
            size = shapes[argument][axis]
            if isinstance(size, torch.SymInt):
                text = sizes.written(size)
                variable = names.get((argument, axis), text)
                self.found.setdefault(text, Axis(argument, axis, variable, expression(size)))

    def written(self, size: Any) -> Written | None:
        """Write a size, or return None if no argument tells it."""
        text = self.sizes.written(size)
        tree = parsed(text)
        names = names_in(tree)
        if text in self.found:
            names, tree = {text}, name_of(text)
        if names <= set(self.found):
            self.read |= names
            variables = {name: name_of(self.found[name].variable) for name in names}
            return with_operands(tree, variables)
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
        """Read the sizes that are used, each once."""
        read = [axis for text, axis in self.found.items() if text in self.read]
        return shape_reads((axis.argument, axis.axis, axis.variable) for axis in read)
