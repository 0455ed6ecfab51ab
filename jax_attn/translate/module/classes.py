"""Write the classes of the file: one for the modules of a class of torch, or two."""

import ast
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import nn

from jax_attn.translate.module.merging.arguments import Arguments
from jax_attn.translate.module.merging.constants import apart
from jax_attn.translate.module.merging.constructors import alike, constructed
from jax_attn.translate.module.merging.differences import (
    MODE,
    Conditions,
    Flag,
    Use,
    argument_conditions,
    choice_conditions,
    first_name,
    flags,
    identities,
    member_conditions,
    mode_conditions,
)
from jax_attn.translate.module.merging.merger import (
    Condition,
    InseparableError,
    MergedLine,
    Merger,
    Part,
    conditions,
    size,
)
from jax_attn.translate.module.merging.sizes import MethodSizes
from jax_attn.translate.module.merging.written_parts import joined, statements
from jax_attn.translate.module.methods.method import method
from jax_attn.translate.module.places.file_places import FilePlaces
from jax_attn.translate.module.places.members import Members
from jax_attn.translate.rules.expression import literal, name_of, parsed
from jax_attn.translate.tracing.problems import Unsupported

# Longer methods are two classes where less than half of the shortest is shared.
_LONGEST_UNLIKE = 8


@dataclass
class Class:
    """Hold a class of the file.

    Attributes:
      name: its name, torch's where one class of the file stands for torch's.
      paths: the modules that are its instances.
      arguments: what `__init__` takes, by name, with its value in each instance by path; an
        instance without one leaves it at None.
      init: the statements of `__init__`.
      body: those of `__call__`.
      signature: what `__call__` takes, each with whether every call gives it.
      has_modes: whether `__call__` does other things in training mode than in eval mode.
    """

    name: str
    paths: list[str]
    arguments: dict[str, dict[str, Any]] = field(default_factory=dict)
    init: list[ast.stmt] = field(default_factory=list)
    body: list[ast.stmt] = field(default_factory=list)
    signature: dict[str, bool] = field(default_factory=dict)
    has_modes: bool = False

    def is_optional(self, argument: str) -> bool:
        values = self.arguments[argument]
        return any(values.get(path) is None for path in self.paths)


Bodies = Mapping[int, Sequence[ast.stmt]]


class Classes:
    """Arrange a traced reference as classes."""

    def __init__(self, places: FilePlaces) -> None:
        self.places = places
        self.class_of: dict[str, Class] = {}
        self.members = Members(places, self._constructor)

    def _free_name(self, name: str) -> str:
        """Return a name that no class of the file has, nor anything that it imports."""
        taken = {one.name for one in self.class_of.values()} | self.places.taken
        while name in taken:
            name += "_"
        return name

    def _constructor(self, path: str) -> str:
        one = self.class_of[path]
        values = {name: literal(each.get(path)) for name, each in one.arguments.items()}
        options = "".join(f"{name}={ast.unparse(value)}, " for name, value in values.items())
        return f"{one.name}({options}rngs=rngs)"

    @cached_property
    def classes(self) -> list[Class]:
        """Write every class of the file, those that others use first."""
        # Modules that are never called are there too, if others read their tensors.
        paths = dict.fromkeys([*self.places.calls, *self.places.holders()])
        by_depth = sorted(paths, key=lambda path: (-path.count(".") if path else 1, path))
        waiting: dict[tuple[type[nn.Module], int], list[str]] = {}
        levels: dict[str, int] = {}
        for path in by_depth:
            kind = type(self.places.modules[path])
            inside = [
                other
                for other in levels
                if type(self.places.modules[other]) is kind and _is_inside(other, path)
            ]
            # A module of the class of one around it needs a class that is written before.
            levels[path] = level = max((levels[other] + 1 for other in inside), default=0)
            waiting.setdefault((kind, level), []).append(path)
        found: list[Class] = []
        # A class comes after those of the modules that its instances contain.
        while waiting:
            ready = [
                key
                for key, paths_ in waiting.items()
                if not any(
                    _is_inside(other, path)
                    for path in paths_
                    for others_key, others in waiting.items()
                    if others_key is not key
                    for other in others
                )
            ] or [next(iter(waiting))]
            for key in ready:
                found += self._of_kind(key[0], sorted(waiting.pop(key)))
        for one in found:
            one.init = [constructed(statement) for statement in one.init]
        return found

    def _of_kind(self, kind: type[nn.Module], paths: list[str]) -> list[Class]:
        """Write the class of a class of torch, or two where they would share too little."""
        uses = [
            Use(path, call, call in self.places.training)
            for path in paths
            for call in self.places.calls.get(path, ()) or (None,)
        ]
        # An instance that is never called may have any method.
        bodies = {
            index: method(use.call, self.places.trees[use.is_training])
            for index, use in enumerate(uses)
            if use.call is not None
        } or {0: []}
        for path in paths:
            of_path = [index for index in bodies if uses[index].path == path]
            trained = [bodies[index] for index in of_path if uses[index].is_training]
            evaluated = [bodies[index] for index in of_path if not uses[index].is_training]
            for bodies_ in zip(evaluated, trained, strict=False):
                apart(*bodies_)
        inits = {path: self.members.init(path) for path in paths}

        def of(part: Collection[int]) -> _Writing:
            """Write the class for a part of the uses."""
            kept = sorted(part)
            theirs = {n: bodies[index] for n, index in enumerate(kept) if index in bodies}
            return _Writing(kind, self.places, [uses[index] for index in kept], theirs, inits)

        writing = of(range(len(uses)))
        try:
            parts = writing.merger.merged()
        except InseparableError:
            self._refuse(uses, bodies)
            # Written for one use only, so that other reasons are found too.
            made = self._taken([of([next(iter(bodies))])])
            self.class_of |= dict.fromkeys(paths, made[0])
            return made
        shared = sum(isinstance(part, MergedLine) for part in parts)
        shortest = min(map(len, bodies.values()))
        if size(parts) > _LONGEST_UNLIKE and 2 * shared < shortest:
            halves = sorted(map(set, writing.merger.halves()), key=len, reverse=True)
            halves[0] |= {*range(len(uses))} - {*bodies}
            parted = [{uses[index].path for index in half} for half in halves]
            if not parted[0] & parted[1]:
                return self._taken([*map(of, halves)])
        return self._taken([writing])

    def _taken(self, writings: "Sequence[_Writing]") -> list[Class]:
        made: list[Class] = []
        for writing in writings:
            paths = list(dict.fromkeys(use.path for use in writing.uses))
            suffix = _suffix(paths, made) if made else ""
            one = writing.written(self._free_name(writing.kind.__name__ + suffix))
            self.class_of |= dict.fromkeys(paths, one)
            made.append(one)
            for path in sorted(writing.arguments.mixed):
                self._refuse_path(path)
        return made

    def _refuse(self, uses: Sequence[Use], bodies: Bodies) -> None:
        texts: dict[str, set[str]] = {}
        for index, body in bodies.items():
            text = ast.unparse(ast.fix_missing_locations(ast.Module(list(body), [])))
            texts.setdefault(uses[index].path, set()).add(text)
        for path, different in texts.items():
            if len(different) > 1:
                self._refuse_path(path)

    def _refuse_path(self, path: str) -> None:
        reason = (
            "is called in two ways, which one method does not hold; if it is called at "
            "two sizes, name them in `dynamic`"
        )
        self.places.problems.append(Unsupported("module", path, reason))


class _Writing:
    """Write one class. Use `written`."""

    def __init__(
        self,
        kind: type[nn.Module],
        places: FilePlaces,
        uses: Sequence[Use],
        bodies: Bodies,
        inits: Mapping[str, Mapping[str, ast.stmt]],
    ) -> None:
        self.kind, self.uses = kind, uses
        self.paths = list(dict.fromkeys(use.path for use in uses))
        self.inits = {path: inits[path] for path in self.paths}
        modules = {path: places.modules[path] for path in self.paths}
        calls = {index: use.call for index, use in enumerate(uses) if use.call is not None}
        names = places.axis_names(next(iter(calls.values()))) if calls else {}
        self.sizes = MethodSizes(calls, names)
        self.arguments = Arguments(modules, [use.path for use in uses], self.sizes)
        self.signature = self._signature(places)
        self.conditions = Conditions(uses, "self.")
        for flag, rank in flags(modules, kind):
            self.conditions.add(flag, rank)
        for flag in identities(modules):
            self.conditions.add(flag, (4,))
        known = [
            *mode_conditions(uses),
            *self.conditions.known,
            *choice_conditions(uses, places.choices),
            *argument_conditions(uses, list(self.signature)),
            *member_conditions(uses, self.inits),
        ]
        self.merger = Merger(bodies, known, self._new)

    def _signature(self, places: FilePlaces) -> dict[str, bool]:
        calls = [use.call for use in self.uses if use.call is not None]
        if not calls:
            return {}
        return {
            name: not calls[0].path
            or all(name in call.given or name in places.choices(call) for call in calls)
            for name in places.signature(calls[0])
        }

    def _new(
        self, holds: frozenset[int], others: frozenset[int], own: Sequence[ast.stmt]
    ) -> Condition | None:
        return self.conditions.made(holds, others, f"computes_{first_name(own)}")

    def written(self, name: str) -> Class:
        parts = self.merger.merged()
        for added in self._needed(parts, self.conditions):
            self.arguments.attributes[added] = name_of(added)
        # Flags are named by the conditions, so they take their names before constants do.
        init_parts = joined(self._init())
        body = self.sizes.reads(statements(parts, self.arguments.body))
        init = statements(init_parts, self.arguments.init)
        has_modes = any(condition.text == MODE for condition in conditions(parts))
        if has_modes:
            self.arguments.attributes["deterministic"] = ast.Constant(True)
        if any("self.rngs()" in ast.unparse(each) for each in body):
            self.arguments.attributes["rngs"] = parsed("rngs.dropout.fork()")
        attributes = [
            ast.Assign([parsed(f"self.{name}")], value)
            for name, value in self.arguments.attributes.items()
        ]
        init = [*attributes, *init]
        return Class(name, self.paths, self.arguments.values, init, body, self.signature, has_modes)

    def _needed(self, parts: Sequence[Part], known: Conditions) -> list[str]:
        """Make the flags of a merged body arguments of `__init__`."""
        found = (known.flags.get(condition.text) for condition in conditions(parts))
        return [self.arguments.add(flag.name, flag.values) for flag in found if flag is not None]

    def _init(self) -> list[Part]:
        """Merge the statements of `__init__`, one attribute after another."""
        names = {name: None for members in self.inits.values() for name in members}
        return [part for name in names for part in self._made(name)]

    def _made(self, name: str) -> list[Part]:
        """Merge the statements that make one attribute; instances without it have None."""
        known = Conditions(self.uses)
        for flag in self.conditions.flags.values():
            known.add(flag, (0 if flag.name in self.arguments.values else 1,))
        having = {path: name in members for path, members in self.inits.items()}
        known.add(Flag(name, having, "{}", "not {}"), (2,))
        absent = ast.parse(f"self.{name} = None").body[0]
        made = [self.inits[use.path].get(name, absent) for use in self.uses]

        def new(
            holds: frozenset[int], others: frozenset[int], own: Sequence[ast.stmt]
        ) -> Condition | None:
            return known.made(holds, others, f"is_other_{name}")

        tried = [
            Merger(dict(enumerate(bodies)), known.known, new).merged()
            for bodies in ([[each] for each in way] for way in alike(made))
        ]
        parts = min(tried, key=size)
        self._needed(parts, known)
        return parts


def _is_inside(path: str, around: str) -> bool:
    return path.startswith(f"{around}.") or (not around and bool(path))


def _suffix(members: list[str], made: list[Class]) -> str:
    """Name a second class of one of torch's by a part of its path, or by order."""
    others = {part for one in made for path in one.paths for part in path.split(".")}
    for part in members[0].split("."):
        if part not in others and not part.isdigit():
            return "In" + "".join(word[:1].upper() + word[1:] for word in part.split("_"))
    return "Second"
