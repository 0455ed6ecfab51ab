"""Write sizes in which the instances of a class differ, as a person would."""

import ast
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from jax_attn.translate.module.methods.axes import Place, shape_reads
from jax_attn.translate.rules.expression import Written, name_of, parsed
from jax_attn.translate.tracing.calls import ModuleCall
from jax_attn.translate.tracing.export.marks import named_leaves

Values = Mapping[int, Any]
"""The value of a constant in each use of a class."""


class MethodSizes:
    """Write the sizes of a method that its arguments tell.

    Attributes:
      assigned: what statements so far assign; an argument among it may be another array by then.

    Args:
      calls: the call of each use of the class.
      names: the variables of the axes whose sizes differ between these.
    """

    def __init__(self, calls: Mapping[int, ModuleCall], names: Mapping[Place, str]) -> None:
        self.calls = calls
        self.names = names
        self.read: dict[Place, str] = {}
        self.assigned: set[str] = set()

    def of_argument(self, values: Values) -> Written | None:
        """Write an axis that has these sizes: its variable, or `x.shape[1]` of an optional x."""
        if not all(type(value) is int for value in values.values()):
            return None
        # Sizes of later axes are those of masks, too.
        for argument, axis in sorted(self.names, key=lambda place: place[1]):
            if any(_size(self.calls[use], argument, axis) != size for use, size in values.items()):
                continue
            if all(argument in call.given for call in self.calls.values()):
                name = self.read.setdefault((argument, axis), self.names[argument, axis])
                return name_of(name)
            if argument not in self.assigned:
                return parsed(f"{argument}.shape[{axis}]")
        return None

    def name(self, values: Values) -> str | None:
        """Return the name of an argument of torch's forward, no tensor, that has these values."""
        leaves = {use: dict(_numbers(self.calls[use])) for use in values}
        for name in leaves[next(iter(values))]:
            if all(leaves[use].get(name) == value for use, value in values.items()):
                return name
        return None

    def reads(self, body: Sequence[ast.stmt]) -> list[ast.stmt]:
        """Return a body that begins by reading the sizes that it uses."""
        body = list(body)
        read = dict(self.read)
        while body and (known := shape_read(body[0])) is not None:
            read.update(known)
            del body[0]
        places = ((*place, name) for place, name in read.items())
        return [*shape_reads(places, self.calls.values()), *body]


def _size(call: ModuleCall, argument: str, axis: int) -> Any:
    """Return the size of an axis, if it is one number."""
    value = call.given[argument].meta["val"] if argument in call.given else None
    if not isinstance(value, torch.Tensor) or axis >= value.ndim:
        return None
    size = value.shape[axis]
    return size if type(size) is int else None


def _numbers(call: ModuleCall) -> Iterator[tuple[str, int]]:
    """Iterate over the integers among the arguments of forward, by the names that it has."""
    for argument, tree in call.arguments.items():
        for name, leaf in named_leaves(argument, tree):
            if type(leaf) is not int:
                continue
            index = name.rpartition("_")[2]
            is_part = name != argument and index.isdigit()
            yield (call.unpacked_name(argument, int(index)) if is_part else None) or name, leaf


def shape_read(statement: ast.stmt) -> dict[Place, str] | None:
    """Return what `B, T = x.shape[:2]` reads."""
    if not isinstance(statement, ast.Assign):
        return None
    target, value = statement.targets[0], statement.value
    shape = value.value if isinstance(value, ast.Subscript) else value
    if not isinstance(shape, ast.Attribute) or shape.attr != "shape":
        return None
    argument = ast.unparse(shape.value)
    if isinstance(target, ast.Tuple):
        names = [ast.unparse(name) for name in target.elts]
        return {(argument, axis): name for axis, name in enumerate(names) if name != "_"}
    assert isinstance(value, ast.Subscript)
    return {(argument, int(ast.unparse(value.slice))): ast.unparse(target)}


def derived(
    values: Mapping[str, Any],
    known: Mapping[str, Mapping[str, Any]],
    modules: Mapping[str, nn.Module],
) -> tuple[str, str] | None:
    """Write sizes as others less, or divided by, a number that torch's modules have.

    Returns the name of the others, and the expression in this name.

    Args:
      values: the size in each instance, by path.
      known: the same of arguments of `__init__`, by name.
      modules: torch's modules, by path.
    """
    if len(set(values.values())) < 2 or not all(type(each) is int for each in values.values()):
        return None
    numbers = {
        number
        for path in values
        for number in vars(modules[path]).values()
        if type(number) is int and number > 1
    }
    for name, number in itertools.product(known, sorted(numbers)):
        theirs = known[name]
        if not all(type(theirs.get(path)) is int for path in values):
            continue
        if all(theirs[path] == size * number for path, size in values.items()):
            return name, f"self.{name} // {number}"
        if all(theirs[path] == size + number for path, size in values.items()):
            return name, f"self.{name} - {number}"
    return None
