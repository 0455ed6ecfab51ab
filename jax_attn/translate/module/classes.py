"""The classes of the file: one for the modules of a class of torch that do alike."""

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import nn

from jax_attn.translate.module.members import Members
from jax_attn.translate.module.method import Method, method
from jax_attn.translate.module.places import FilePlaces
from jax_attn.translate.module.scope import TAKEN
from jax_attn.translate.rules.expression import Written, literal, parsed
from jax_attn.translate.tracing.problems import Unsupported


@dataclass
class Class:
    """A class of the file.

    Attributes:
      name: its name, torch's where one class of the file stands for torch's.
      paths: the modules that are its instances.
      arguments: what `__init__` takes, by name, with the value for each instance.
      init: the statements of `__init__`.
      method: `__call__`, with what differs between instances read from `self`.
      origin: the class of torch.
    """

    name: str
    paths: list[str]
    origin: type[nn.Module]
    arguments: dict[str, list[Any]] = field(default_factory=dict)
    init: list[ast.stmt] = field(default_factory=list)
    method: Method = field(default_factory=lambda: Method([], []))
    signature: list[str] = field(default_factory=list)
    always_given: set[str] = field(default_factory=set)


def _constants(statements: Sequence[ast.stmt]) -> list[ast.Constant]:
    return [
        node
        for statement in statements
        for node in ast.walk(statement)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, (int, float))
        and not isinstance(node.value, bool)
    ]


class _Blank(ast.NodeTransformer):
    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        is_number = isinstance(node.value, (int, float)) and not isinstance(node.value, bool)
        return ast.Name("_", ast.Load()) if is_number else node


def _shape(statements: Sequence[ast.stmt]) -> str:
    """Return a text that is equal for statements that differ in numbers alone."""
    copied = ast.parse(ast.unparse(ast.fix_missing_locations(ast.Module(list(statements), []))))
    return ast.dump(_Blank().visit(copied))


class _Replaced(ast.NodeTransformer):
    def __init__(self, by_id: Mapping[int, Written]) -> None:
        self.by_id = by_id

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        return self.by_id.get(id(node), node)


def _is_same(one: Sequence[ast.stmt], other: Sequence[ast.stmt]) -> bool:
    return [*map(ast.dump, one)] == [*map(ast.dump, other)]


class Classes:
    """Arrange a traced reference as classes."""

    def __init__(self, places: FilePlaces) -> None:
        self.places = places
        self.class_of: dict[str, Class] = {}
        self.members = Members(places, self._constructor)

    def _free_name(self, name: str) -> str:
        """Return a name that no class of the file has, nor anything that it imports."""
        taken = {one.name for one in self.class_of.values()} | TAKEN
        while name in taken:
            name += "_"
        return name

    def _constructor(self, path: str) -> str:
        one = self.class_of[path]
        index = one.paths.index(path)
        options = "".join(f"{name}={each[index]!r}, " for name, each in one.arguments.items())
        return f"{one.name}({options}rngs=rngs)"

    @cached_property
    def classes(self) -> list[Class]:
        """Every class of the file, those that others use first."""
        found: list[Class] = []
        methods = {path: self._method(path) for path in self.places.calls}
        # Modules that are never called, whose tensors others read.
        methods |= {path: Method([], []) for path in self.places.holders()}
        by_depth = sorted(methods, key=lambda path: (-path.count(".") if path else 1, path))
        kinds: dict[type[nn.Module], list[str]] = {}
        for path in by_depth:
            kinds.setdefault(type(self.places.modules[path]), []).append(path)
        # A class comes after those of the modules that its instances contain.
        waiting = dict(kinds)
        while waiting:
            ready = [
                kind
                for kind, paths in waiting.items()
                if not any(
                    other.startswith(f"{path}.") or (not path and other)
                    for path in paths
                    for key, others in waiting.items()
                    if key is not kind
                    for other in others
                )
            ] or [next(iter(waiting))]
            for kind in ready:
                found += self._merged(kind, waiting.pop(kind), methods)
        return found

    def _method(self, path: str) -> Method:
        """Write the method of a module; all its calls must do alike."""
        first, *others = self.places.calls[path]
        written = method(first, self.places.tree)
        for call in others:
            if not _is_same(method(call, self.places.tree).body, written.body):
                self.places.problems.append(
                    Unsupported(
                        "module",
                        path,
                        "is called in two ways, which one method does not hold; if it is called at "
                        "two sizes, name them in `dynamic`",
                    )
                )
        return written

    def _merged(
        self, kind: type[nn.Module], paths: list[str], methods: Mapping[str, Method]
    ) -> list[Class]:
        groups: dict[str, list[str]] = {}
        inits = {}
        for path in sorted(paths):
            inits[path] = self.members.init(path)
            groups.setdefault(_shape([*methods[path].body, *inits[path]]), []).append(path)
        made: list[Class] = []
        for index, members in enumerate(groups.values()):
            name = self._free_name(kind.__name__ + ("" if not index else _suffix(members, made)))
            first = members[0]
            calls = [call for path in members for call in self.places.calls.get(path, ())]
            one = Class(name, members, kind)
            if calls:
                one.signature = self.places.signature(calls[0])
                given = [set(call.given) for call in calls]
                one.always_given = set.intersection(*given) if first else set(one.signature)
            bodies = [methods[path].body for path in members]
            self._unify(one, bodies, [inits[path] for path in members])
            one.method = replace(methods[first], body=bodies[0])
            for path in members:
                self.class_of[path] = one
            made.append(one)
        return made

    def _unify(self, one: Class, bodies: list[list[ast.stmt]], inits: list[list[ast.stmt]]) -> None:
        """Make the numbers in which instances differ arguments of `__init__`."""
        modules = [self.places.modules[path] for path in one.paths]
        # By text, as 2 and 2.0 are equal and are not the same.
        by_values: dict[str, str] = {}
        attributes: dict[str, Written] = {}

        def named(values: tuple[Any, ...], hint: str) -> str:
            key = repr(values)
            if key not in by_values:
                by_values[key] = self._argument(modules, values, hint, set(one.arguments))
                one.arguments[by_values[key]] = list(values)
            return by_values[key]

        replaced: dict[int, Written] = {}
        for constants in zip(*map(_constants, bodies), strict=True):
            values = tuple(constant.value for constant in constants)
            known = _attribute(modules, values)
            if _differ(values):
                name = named(values, "value")
                attributes[name] = ast.Name(name, ast.Load())
            elif isinstance(values[0], float) and known and values[0] not in (0.0, 0.5, 1.0, 2.0):
                name = known
                attributes.setdefault(name, literal(values[0]))
            else:
                continue
            replaced[id(constants[0])] = parsed(f"self.{name}")
        bodies[0] = [_Replaced(replaced).visit(statement) for statement in bodies[0]]
        replaced = {}
        hints = _hints(inits[0])
        for constants in zip(*map(_constants, inits), strict=True):
            values = tuple(constant.value for constant in constants)
            if _differ(values):
                hint = hints.get(id(constants[0]), "size")
                replaced[id(constants[0])] = ast.Name(named(values, hint), ast.Load())
        one.init = [_Replaced(replaced).visit(statement) for statement in inits[0]]
        one.init += [
            ast.Assign([parsed(f"self.{name}")], value) for name, value in attributes.items()
        ]

    def _argument(
        self, modules: list[nn.Module], values: tuple[Any, ...], hint: str, taken: set[str]
    ) -> str:
        name = _attribute(modules, values) or hint
        while name in taken:
            name += "_"
        return name


def _differ(values: Sequence[Any]) -> bool:
    """Return whether numbers differ, 2 from 2.0 too."""
    return len({repr(value) for value in values}) > 1


def _suffix(members: list[str], made: list[Class]) -> str:
    """Name a further class of one of torch's by a part of its path, or by order."""
    others = {part for one in made for path in one.paths for part in path.split(".")}
    for part in members[0].split("."):
        if part not in others and not part.isdigit():
            return "In" + "".join(word.capitalize() for word in part.split("_"))
    return _ORDER[min(len(made), len(_ORDER)) - 1] * max(1, len(made) - len(_ORDER) + 1)


_ORDER = ("Second", "Third", "Fourth", "Fifth", "Sixth", "Seventh", "Eighth", "Other")


def _attribute(modules: Sequence[nn.Module], values: Sequence[Any]) -> str | None:
    """Return the attribute of torch's modules that has these values, if exactly that is so."""
    for name, value in vars(modules[0]).items():
        if name.startswith("_") or isinstance(value, bool) or type(value) is not type(values[0]):
            continue
        if all(
            getattr(module, name, None) == expected
            for module, expected in zip(modules, values, strict=True)
        ):
            return name
    return None


def _hints(statements: Sequence[ast.stmt]) -> dict[int, str]:
    """Name the constants of constructors by the attribute and the keyword that they stand at."""
    found: dict[int, str] = {}
    for statement in statements:
        for node in ast.walk(statement):
            for keyword in node.keywords if isinstance(node, ast.Call) else ():
                for each in ast.walk(keyword.value):
                    found.setdefault(id(each), keyword.arg or "size")
    for statement in statements:
        assert isinstance(statement, ast.Assign)
        target = ast.unparse(statement.targets[0]).removeprefix("self.")
        for each in ast.walk(statement.value):
            found.setdefault(id(each), f"{target}_size")
    return found
