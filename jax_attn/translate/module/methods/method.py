"""Write one call of a module as statements, with the names of torch's own source."""

import ast
import keyword
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from torch.fx import Node

from jax_attn.translate.module.methods.expressions import Expressions, element
from jax_attn.translate.module.methods.loops import Loop, run_from
from jax_attn.translate.module.methods.scope import MethodContext
from jax_attn.translate.module.methods.tidy import tidied, without_swaps, without_unread
from jax_attn.translate.rules.expression import Written, literal, name_of
from jax_attn.translate.tracing.calls import ModuleCall
from jax_attn.translate.tracing.source.source_lines import aliases, loop_variable


def _elements(expression: str, tree: Any) -> Iterator[tuple[Node, str]]:
    """Iterate over the tensors of an argument, each with the expression that reads it."""
    if isinstance(tree, Node):
        yield tree, expression
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _elements(f"{expression}[{key!r}]", value)
    elif isinstance(tree, (list, tuple)):
        for index, value in enumerate(tree):
            yield from _elements(f"{expression}[{index}]", value)


class Writer(Expressions):
    """Write one call as a method. Use `method`."""

    def __init__(self, call: ModuleCall, tree: MethodContext) -> None:
        super().__init__(call, tree)
        self.body: list[ast.stmt] = []
        self.unpacked: list[ast.stmt] = []
        self.written_already: set[int] = set()

    def _assigned(self, value: Node, place: int) -> str:
        """Choose the name of a value, keeping what a name holds while it is still read."""
        name = self._own_name(value) or self._made_name(value)
        if self._is_busy(name, place, value):
            name = self._helper_name(value) or name
        name = self._safe(name)
        if self._is_busy(name, place, value):
            held = self.held[name]
            frame = self._frame(self.produced[value])
            other = next((a for a, n in aliases(frame) if n == name), None) if frame else None
            if other is None or self._is_busy(other, place):
                name = self._free(f"new_{name}", place)
            else:
                self._store([other], name_of(name))
                self.names[held] = other
                self.held[other] = held
        self.names[value] = name
        self.held[name] = value
        return name

    def _safe(self, name: str) -> str:
        """Return a name that means nothing else in the file."""
        sizes = {*self.tree.sizes.names.values(), *self.axes.names.values()}
        is_taken = name in self.tree.taken or name in sizes
        return f"{name}_" if is_taken or keyword.iskeyword(name) else name

    def _is_busy(self, name: str, place: int, value: Node | None = None) -> bool:
        """Return whether something after a place reads what a name holds, other than a value."""
        held = self.held.get(name)
        return held is not None and held is not value and self._last_use(held) > place

    def _free(self, name: str, place: int) -> str:
        while self._is_busy(name, place):
            name = f"new_{name}"
        return name

    def assign(self, values: Sequence[Node], made: Written, place: int) -> None:
        self._store([self._assigned(value, place) for value in values], made)

    def _store(self, names: Sequence[str], made: Written) -> None:
        self.body.append(ast.Assign([_target(names)], made))
        self.assigned.update(names)

    def _assign_outputs(self, item: ModuleCall, place: int) -> None:
        """Assign the outputs of a call, those too that it hands on or that nothing reads."""
        made = self.called(item)
        outputs = self.tree.outputs(item)
        names: dict[int, str] = {}
        for index, value in enumerate(outputs):
            if value is not None and self.produced.get(value) is item and self.uses[value]:
                names[index] = self._assigned(value, place)
        for index, value in enumerate(outputs):
            if index not in names:
                name = self._output_name(item, index)
                names[index] = self._spare(name, value, place, names.values())
        self._store([names[index] for index in range(len(outputs))], made)

    def _spare(
        self, name: str | None, value: Node | None, place: int, others: Collection[str]
    ) -> str:
        """Return torch's name of an output that is known already or that nothing reads, or `_`."""
        if (
            name is None
            or name in self.tree.taken
            or name in others
            or self._is_busy(name, place, value)
        ):
            return "_"
        self.held.pop(name, None)
        if value is not None and value in self.names:
            self.names[value], self.held[name] = name, value
        return name

    def _loop(self, run: Loop, place: int) -> None:
        """Write calls of the modules of a list as one loop."""
        first, last = run.calls[0], run.calls[-1]
        names: dict[str, str] = {}
        for argument, output in run.carried.items():
            start = first.given.get(argument)
            name = self._carried_name(first, argument, output)
            while name in names.values() or self._is_busy(name, place - 1, start):
                name = f"new_{name}"
            names[argument] = name
            before = self.written(start)
            if not (isinstance(before, ast.Name) and before.id == name):
                self._store([name], before)
            elif start is not None and self._last_use(start) > place:
                kept = self._free(f"first_{name}", place)
                self._store([kept], name_of(name))
                self.names[start], self.held[kept] = kept, start
        frame = self._frame(first)
        variable = self._safe((loop_variable(frame) if frame else None) or "layer")
        while variable in names.values() or self._is_busy(variable, place):
            variable = f"new_{variable}"
        made = self.call_of(first, name_of(variable), names)
        variables = {run.carried[argument]: name for argument, name in names.items()}
        targets: list[str] = []
        for index, value in enumerate(self.tree.outputs(last)):
            if index in variables:
                targets.append(variables[index])
            elif value is not None and self.produced.get(value) is last and self.uses[value]:
                targets.append(self._assigned(value, place))
            else:
                targets.append("_")
            if value is not None and index in variables:
                self.names[value], self.held[targets[-1]] = targets[-1], value
        self.assigned.update(targets)
        modules = self.tree.members(self.call.path, [call.path for call in run.calls])
        target = ast.Name(variable, ast.Store())
        self.body.append(ast.For(target, modules, [ast.Assign([_target(targets)], made)], []))

    def _carried_name(self, first: ModuleCall, argument: str, output: int) -> str:
        """Return the variable of what each pass of a loop hands to the next."""
        value = self.tree.outputs(first)[output]
        name = self._own_name(value) if value in self.produced and value is not None else None
        place = self._statement(first)
        if len(self.tree.outputs(first)) > 1 and (place is None or len(place.targets) < 2):
            name = argument
        return self._safe(name or argument)

    def method(self) -> list[ast.stmt]:
        """Write the method."""
        for name, node in self.call.given.items():
            self.names[node], self.held[name] = name, node
        if not self.call.path:
            self._unpack()
        place = 0
        while place < len(self.items):
            item = self.items[place]
            self.place = place
            if run := run_from(self, place):
                self._loop(run, place)
                place += len(run.calls)
                continue
            place += 1
            values = [
                value
                for value in (item.results if isinstance(item, ModuleCall) else (item,))
                if self.uses[value]
            ]
            if id(item) in self.written_already:
                continue
            if not values or all(self._is_folded(value) for value in values):
                continue
            if isinstance(item, ModuleCall) and len(self.tree.outputs(item)) > 1:
                self._assign_outputs(item, place - 1)
                continue
            if isinstance(item, Node) and isinstance(item.meta["val"], (tuple, list)):
                self._several(item, place - 1)
                continue
            self.assign(values, self.expression(values[0]), place - 1)
        self.place = len(self.items)
        self.body.append(ast.Return(self._return_value()))
        body = without_swaps(without_unread([tidied(each) for each in self.body]))
        return [*self.unpacked, *self.axes.statements(), *body]

    def _unpack(self) -> None:
        """Read the tensors in sequences and dicts that the reference itself is given."""
        for argument, tree in self.call.arguments.items():
            for value, expression in _elements(argument, tree):
                name = next((n for n, node in self.call.given.items() if node is value), argument)
                if name != argument:
                    self.unpacked += ast.parse(f"{name} = {expression}").body

    def _several(self, item: Node, place: int) -> None:
        """Assign the outputs of an operator that has several, or leave them to their users."""
        users = [user for user in self.users[item] if isinstance(user, Node)]
        made = self._operator(item)
        if isinstance(made, tuple):
            return
        indices = [element(user)[1] for user in users]
        if sorted(indices) == list(range(len(item.meta["val"]))) and len(indices) > 1:
            ordered = sorted(users, key=lambda user: element(user)[1])
            self.assign(ordered, made, place)
            self.written_already.update(id(user) for user in ordered)
        else:
            self.assign([item], made, place)

    def _return_value(self) -> Written:
        if not self.call.path:
            return self._tree_of(self.tree.returned)
        values = [self.written(value) for value in self.returned]
        return values[0] if len(values) == 1 else ast.Tuple(values, ast.Load())

    def _tree_of(self, value: Any) -> Written:
        if isinstance(value, dict):
            kept = {key: each for key, each in value.items() if each is not None}
            return ast.Dict(
                [literal(key) for key in kept], [self._tree_of(each) for each in kept.values()]
            )
        if isinstance(value, (list, tuple)):
            return ast.Tuple([self._tree_of(each) for each in value], ast.Load())
        return self.written(value)


def _target(names: Sequence[str]) -> ast.expr:
    targets: list[ast.expr] = [ast.Name(name, ast.Store()) for name in names]
    return targets[0] if len(targets) == 1 else ast.Tuple(targets, ast.Store())


def method(call: ModuleCall, tree: MethodContext) -> list[ast.stmt]:
    """Write one call as a method."""
    return Writer(call, tree).method()
