"""Make arguments of `__init__` of the constants in which statements of a class differ."""

import ast
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import nn

from jax_attn.translate.module.merging.constants import constants, replaced
from jax_attn.translate.module.merging.constructors import parameter_names
from jax_attn.translate.module.merging.differences import UNFIT, members_of
from jax_attn.translate.module.merging.merger import MergedLine
from jax_attn.translate.module.merging.sizes import MethodSizes, derived
from jax_attn.translate.rules.expression import Written, literal, name_of, parsed, stored

# Numbers that say what they mean.
_PLAIN = (0.0, 0.5, 1.0, 2.0)


class Arguments:
    """Collect the arguments of the `__init__` of a class.

    Attributes:
      values: for each argument, by name, its value in each instance that needs it, by path.
      attributes: what `__init__` keeps for the method, by name.
      mixed: the modules that would need two values of one argument.

    Args:
      modules: the instances, by path.
      paths: the instance of each use of the class.
      sizes: the sizes that the arguments of the method tell.
    """

    def __init__(
        self, modules: Mapping[str, nn.Module], paths: Sequence[str], sizes: MethodSizes
    ) -> None:
        self.modules = modules
        self.paths = paths
        self.sizes = sizes
        self.values: dict[str, dict[str, Any]] = {}
        self.attributes: dict[str, Written] = {}
        self.mixed: set[str] = set()
        # What modules hold keeps its names.
        self.members = members_of(modules.values())

    def add(self, name: str, values: Mapping[str, Any]) -> str:
        """Take an argument of these values; one that has them already under this name serves."""
        while name in self.values and not _agree(self.values[name], values):
            name += "_"
        self.values[name] = {**self.values.get(name, {}), **values}
        return name

    def constant(self, values: Mapping[str, Any], hint: str) -> str:
        """Return the argument that has these values, a new one if there is none."""
        for name, known in self.values.items():
            is_part = values.keys() <= known.keys() or known.keys() <= values.keys()
            shared = {repr(known[path]) for path in values.keys() & known.keys()}
            if is_part and len(shared) > 1 and _agree(known, values):
                return self.add(name, values)
        while hint in self.members or hint in UNFIT:
            hint += "_"
        return self.add(self._attribute(values) or hint, values)

    def _attribute(self, values: Mapping[str, Any]) -> str | None:
        """Return the attribute of torch's modules that has these values, by path."""
        return attribute_of(self.modules, values, self.members | UNFIT)

    def body(self, line: MergedLine) -> ast.stmt:
        """Write a statement of the method, with what differs read from `self`."""
        found: dict[int, Written] = {}
        for node, by_use in self._constants(line):
            if _differ(by_use):
                found[id(node)] = self.sizes.of_argument(by_use) or self._kept(by_use, line)
                continue
            known = self._attribute(self._by_path(by_use))
            if isinstance(node.value, float) and known and node.value not in _PLAIN:
                # Another branch of the method may read another value of it in other instances.
                if _differ({path: vars(each).get(known) for path, each in self.modules.items()}):
                    found[id(node)] = self._kept(by_use, line)
                    continue
                self.attributes.setdefault(known, literal(node.value))
                found[id(node)] = parsed(f"self.{known}")
        self.sizes.assigned |= stored(_first(line))
        return replaced(_first(line), found)

    def _kept(self, by_use: Mapping[int, Any], line: MergedLine) -> Written:
        """Keep what differs as an attribute, unless others tell it."""
        values = self._by_path(by_use)
        found = None
        if self._attribute(values) is None:
            found = derived(values, self.values, self.modules)
        if found is None:
            name = self.constant(values, self.sizes.name(by_use) or _size_name(line))
            found = name, f"self.{name}"
        name, text = found
        self.attributes[name] = name_of(name)
        return parsed(text)

    def init(self, line: MergedLine) -> ast.stmt:
        """Write a statement of `__init__`, with what differs given as arguments."""
        hints = _hints(_first(line))
        found: dict[int, Written] = {}
        for node, by_use in self._constants(line):
            if _differ(by_use):
                name = self.constant(self._by_path(by_use), hints.get(id(node), "size"))
                found[id(node)] = name_of(name)
        return replaced(_first(line), found)

    def _constants(self, line: MergedLine) -> list[tuple[ast.Constant, dict[int, Any]]]:
        """Return each constant of a line, with its value in each use."""
        return [
            (nodes[0], {use: node.value for use, node in zip(line.statements, nodes, strict=True)})
            for nodes in zip(*map(constants, line.statements.values()), strict=True)
        ]

    def _by_path(self, by_use: Mapping[int, Any]) -> dict[str, Any]:
        """Return values by instance."""
        values: dict[str, Any] = {}
        for use, value in by_use.items():
            path = self.paths[use]
            if repr(values.setdefault(path, value)) != repr(value):
                self.mixed.add(path)
        return values


def _first(line: MergedLine) -> ast.stmt:
    return next(iter(line.statements.values()))


def _agree(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return all(repr(one[path]) == repr(other[path]) for path in one.keys() & other.keys())


def _differ(values: Mapping[Any, Any]) -> bool:
    """Return whether constants differ, 2 from 2.0 too."""
    return len({repr(value) for value in values.values()}) > 1


def attribute_of(
    modules: Mapping[str, nn.Module], values: Mapping[str, Any], unfit: Collection[str]
) -> str | None:
    """Return the attribute of torch's modules that has these values, by path, if its name fits."""
    (path, first), *others = values.items()
    for name, value in vars(modules[path]).items():
        if name.startswith("_") or name in unfit:
            continue
        if isinstance(value, bool) or type(value) is not type(first):
            continue
        if value == first and all(
            getattr(modules[other], name, None) == expected for other, expected in others
        ):
            return name
    return None


def _size_name(line: MergedLine) -> str:
    """Name a number by the variable that it helps to compute."""
    statement = _first(line)
    target = statement.targets[0] if isinstance(statement, ast.Assign) else None
    return f"{target.id}_size" if isinstance(target, ast.Name) else "size"


def _hints(statement: ast.stmt) -> dict[int, str]:
    """Name the constants of constructors by the parameter or the attribute that they stand at."""
    found: dict[int, str] = {}

    def name(tree: ast.expr, hint: str) -> None:
        for each in ast.walk(tree):
            found.setdefault(id(each), hint)

    for node in ast.walk(statement):
        if isinstance(node, ast.Call):
            for hint, argument in zip(parameter_names(node), node.args, strict=False):
                name(argument, hint)
            for keyword in node.keywords:
                name(keyword.value, keyword.arg or "size")
    assert isinstance(statement, ast.Assign)
    target = ast.unparse(statement.targets[0]).removeprefix("self.")
    name(statement.value, f"{target}_size")
    return found
