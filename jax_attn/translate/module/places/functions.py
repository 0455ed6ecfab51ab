"""Write as functions of the file what torch's source calls in two places."""

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from jax_attn.translate.module.merging.constants import constants, replaced, text_of
from jax_attn.translate.module.merging.sizes import shape_read
from jax_attn.translate.module.methods.axes import Place, axis_names, shape_reads
from jax_attn.translate.module.methods.method import method
from jax_attn.translate.module.methods.scope import MethodContext
from jax_attn.translate.module.methods.tidy import without_unread
from jax_attn.translate.module.places.class_calls import ordered, returned_places
from jax_attn.translate.module.places.source_sizes import SourceSizes
from jax_attn.translate.rules.expression import Written, name_of, names_in, parsed, stored
from jax_attn.translate.tracing.calls import ModuleCall
from jax_attn.translate.tracing.problems import Unsupported


@dataclass(frozen=True)
class FileFunction:
    """Hold a function of the file: its name, what it takes, and its statements."""

    name: str
    parameters: tuple[str, ...]
    body: list[ast.stmt]


class Functions:
    """Collect the functions of the file.

    Attributes:
      of_call: the function of each call that is written as a call, by the call's identity.
      calls: the calls of each function of torch's, inner functions first.
      owners: the call of a module in which each call of a function is, by identity.
      returns: the places of what each function returns that its calls are read for.
    """

    def __init__(self, roots: Sequence[ModuleCall]) -> None:
        self.of_call: dict[int, FileFunction] = {}
        self.calls: dict[Callable[..., Any], list[ModuleCall]] = {}
        self.owners: dict[int, ModuleCall] = {}
        for root in roots:
            self._collect(root, root)
        self.returns = {function: returned_places(calls) for function, calls in self.calls.items()}

    def _collect(self, root: ModuleCall, owner: ModuleCall) -> None:
        """Find the calls of functions in a call, inner functions first."""
        inside = [step for step in root.steps if isinstance(step, ModuleCall)]
        for step in inside:
            self._collect(step, step if step.function is None else owner)
        for step in inside:
            if step.function is not None:
                self.calls.setdefault(step.function, []).append(step)
                self.owners[id(step)] = owner

    def _are_in_two_places(self, calls: Sequence[ModuleCall]) -> bool:
        """Return whether one module makes two of the calls, or modules of two classes make some."""
        owners = [self.owners[id(call)] for call in calls]
        kinds = {type(owner.module) for owner in owners}
        return len(kinds) > 1 or len({*map(id, owners)}) < len(owners)

    @property
    def written(self) -> list[FileFunction]:
        """Return the functions of the file, inner functions first."""
        return list({id(each): each for each in self.of_call.values()}.values())

    def write(self, context: Callable[[ModuleCall], MethodContext], taken: set[str]) -> None:
        """Write each function that is called in two places or more, and take its name.

        context: what the method of a call reads.
        """
        several = [f for f, calls in self.calls.items() if self._are_in_two_places(calls)]
        # A caller's argument hides a function of its name, which the source has from another file.
        callers = chain(self.owners.values(), *self.calls.values())
        hidden = {name for call in callers for name in call.given}
        names = {function: function.__name__ for function in several}
        usable = [
            function
            for function in several
            if list(names.values()).count(names[function]) == 1
            and names[function] not in taken | hidden
            and self.returns[function] is not None
        ]
        taken.update(names[function] for function in usable)
        for function in usable:
            self._write(function, context)

    def _write(
        self, function: Callable[..., Any], context: Callable[[ModuleCall], MethodContext]
    ) -> None:
        calls = [call for call in self.calls[function] if call.results]
        if not calls:
            return
        problems: list[Unsupported] = []
        names = axis_names(calls, lambda call: context(call).sizes)
        own: dict[str, Any] = {
            "problems": problems,
            "axis_names": lambda call: names,
            "dropout": lambda path, rate: "dropout",  # of a module, which a function has not
        }
        bodies = {id(call): method(call, replace(context(call), **own)) for call in calls}
        if problems:
            return
        calls = [call for call in calls if not any("self" in names_in(s) for s in bodies[id(call)])]
        if not calls:
            return
        sourced = {id(call): _Sourced(bodies[id(call)], call) for call in calls}
        alike: dict[tuple[Any, ...], list[ModuleCall]] = {}
        for call in calls:
            key = (*call.given, *map(text_of, sourced[id(call)].body))
            alike.setdefault(key, []).append(call)
        most = max(alike.values(), key=len)
        same = [call for call in most if _equal(sourced[id(call)].body, sourced[id(most[0])].body)]
        for group in (most, same):
            made = _merged([sourced[id(call)] for call in group], group)
            if made is not None and self._are_in_two_places(group):
                self.of_call |= {id(call): made for call in group}
                return


def _equal(one: Sequence[ast.stmt], other: Sequence[ast.stmt]) -> bool:
    return [*map(ast.unparse, one)] == [*map(ast.unparse, other)]


class _Sourced:
    """Rewrite the body of a call with sizes as torch's source writes them.

    Attributes:
      body: the statements; those that read sizes of arguments come first.
      numbers: the parameters that are numbers.
      assigned: what statements so far assign; an argument among it may be another value by then.
      varying: the sizes that the statements read, by name.
    """

    def __init__(self, body: Sequence[ast.stmt], call: ModuleCall) -> None:
        self.source = SourceSizes([call])
        self.numbers: dict[str, None] = {}
        self.assigned: set[str] = set()
        reads: dict[Place, str] = {}
        lines = list(body)
        while lines and (known := shape_read(lines[0])) is not None:
            reads.update(known)
            del lines[0]
        sizes = self.source.known[0]
        self.varying = {name: sizes[given].shape[axis] for (given, axis), name in reads.items()}
        used: set[str] = set()
        for line in lines:
            for shape in _shapes(line):
                used |= self._replace(shape)
            used |= self._cut(line)
            self.assigned |= stored(line)
        own = {place: name for name, place in self.source.names.items() if name in used}
        read = {name for line in lines for name in names_in(line)}
        kept = {place: name for place, name in reads.items() if name in read}
        places = ((*place, name) for place, name in {**kept, **own}.items())
        # A size that other statements read by its name in `dynamic` has two names.
        twice: list[ast.stmt] = [
            ast.Assign([ast.Name(name, ast.Store())], name_of(own[place]))
            for place, name in kept.items()
            if own.get(place, name) != name
        ]
        self.body = without_unread([*shape_reads(places, [call]), *twice, *lines])

    def _take(self, tree: Written) -> set[str] | None:
        """Return the names in an expression of the source, or None if one is another value."""
        names = names_in(tree)
        if names & self.assigned:
            return None
        numbers = self.source.calls[0].arguments
        self.numbers |= {name: None for name in names if type(numbers.get(name)) is int}
        return names

    def _value(self, size: ast.expr) -> Any:
        """Return the number, or the symbol, that a size of the body is."""
        number = _constant(size)
        if number is not None:
            return number
        try:
            return eval(ast.unparse(size), {"__builtins__": {}}, self.varying)
        except Exception:  # it is read from what the body computes
            return None

    def _replace(self, sizes: list[ast.expr]) -> set[str]:
        """Put the sizes of the source in the place of those of a reshape, where all fit."""
        used: set[str] = set()
        for place, tree in enumerate(self.source.reshaped([*map(self._value, sizes)]) or ()):
            if tree is not None and (names := self._take(tree)) is not None:
                sizes[place] = tree
                used |= names
        return used

    def _cut(self, line: ast.stmt) -> set[str]:
        used: set[str] = set()
        for slices in _cuts(line):
            for field, value in ast.iter_fields(slices):
                number = _constant(value) if isinstance(value, ast.expr) else None
                tree = self.source.cut(number) if number else None
                if tree is not None and (names := self._take(tree)) is not None:
                    setattr(slices, field, tree)
                    used |= names
        return used


def _merged(bodies: Sequence[_Sourced], calls: Sequence[ModuleCall]) -> FileFunction | None:
    """Write one function for calls whose bodies differ in numbers.

    Returns None if a number differs that is neither a parameter of torch's function nor the size
    of an argument.
    """
    source = SourceSizes(calls)
    numbers = {name: None for each in bodies for name in each.numbers}
    assigned: set[str] = set()
    body: list[ast.stmt] = []
    for lines in zip(*(each.body for each in bodies), strict=True):
        found: dict[int, Written] = {}
        for nodes in zip(*map(constants, lines), strict=True):
            values = [node.value for node in nodes]
            if len(set(map(repr, values))) == 1:
                continue
            text = source.size(values)
            if text is None or text.partition(".")[0] in assigned:
                return None
            found[id(nodes[0])] = parsed(text)
            if text.isidentifier():
                numbers[text] = None
        assigned |= stored(lines[0])
        body.append(replaced(lines[0], found))
    if numbers.keys() & assigned:
        return None
    parameters = ordered([*calls[0].given, *numbers], calls[0].forward)
    return FileFunction(calls[0].forward.__name__, tuple(parameters), body)


def _shapes(statement: ast.stmt) -> list[list[ast.expr]]:
    """Return the sizes of each reshape and broadcast of a statement."""
    found: list[list[ast.expr]] = []
    for node in ast.walk(statement):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if node.func.attr == "reshape":
            found.append(node.args)
        elif node.func.attr == "broadcast_to" and isinstance(node.args[1], ast.Tuple):
            found.append(node.args[1].elts)
    return found


def _constant(node: ast.expr) -> int | None:
    """Return the number that an expression is, -1 too."""
    try:
        value = ast.literal_eval(node)
    except ValueError:
        return None
    return value if type(value) is int else None


def _cuts(statement: ast.stmt) -> list[ast.Slice]:
    return [node for node in ast.walk(statement) if isinstance(node, ast.Slice)]
