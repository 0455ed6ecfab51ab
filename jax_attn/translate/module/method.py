"""One call of a module as the statements of a method, with the names of torch's own source."""

import ast
import keyword
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from jax_attn.translate.module.axes import Axes
from jax_attn.translate.module.leaves import leaf
from jax_attn.translate.module.scope import TAKEN, MethodContext, MethodScope
from jax_attn.translate.module.tidy import tidied, without_unread
from jax_attn.translate.rules.expression import Written, filled, literal, parsed, with_operands
from jax_attn.translate.rules.rule import bound, described, expressions
from jax_attn.translate.rules.table import RULES
from jax_attn.translate.tracing.calls import ModuleCall
from jax_attn.translate.tracing.problems import Unsupported
from jax_attn.translate.tracing.regions import problem_at
from jax_attn.translate.tracing.source_lines import (
    aliases,
    loop_variable,
)
from jax_attn.translate.tracing.values import is_size, resolved


@dataclass
class Method:
    """The body of `__call__` of one call.

    Attributes:
      arguments: the names of its arguments.
      body: its statements.
      children: the paths of the modules that it calls or reads, in order.
      state: the names of the reference's tensors that it reads as attributes of its own.
    """

    arguments: list[str]
    body: list[ast.stmt]
    children: list[str] = field(default_factory=list)
    state: list[str] = field(default_factory=list)
    functions: list[str] = field(default_factory=list)


def _name(text: str) -> Written:
    return ast.Name(text, ast.Load())


def _element(node: Node) -> tuple[Node, int]:
    """Return what a `getitem` reads, and the index."""
    source, index = node.args
    assert isinstance(source, Node)
    assert isinstance(index, int)
    return source, index


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


class Writer(MethodScope):
    """Write one call as a method. Use `method`."""

    def __init__(self, call: ModuleCall, tree: MethodContext) -> None:
        super().__init__(call, tree)
        self.body: list[ast.stmt] = []
        self.unpacked: list[ast.stmt] = []
        self.written_already: set[int] = set()
        self.place = 0
        self.axes = Axes(call, tree.sizes)
        self.result = Method(list(call.given), [])

    # -- expressions

    def written(self, value: Any) -> Written:
        """Write an operand: a tensor, a size, a constant, or a sequence of these."""
        if isinstance(value, Node):
            if is_size(value):
                return self.size(value.meta["val"])
            value = resolved(value)
            if value in self.names:
                return _name(self.names[value])
            if value in self.tree.state:
                return self._state(value)
            return self.expression(value)
        if isinstance(value, (torch.SymInt, torch.SymFloat)):
            return self.size(value)
        if isinstance(value, (list, tuple)):
            return ast.Tuple([self.written(each) for each in value], ast.Load())
        if isinstance(value, (torch.device, torch.layout, torch.memory_format)):
            return literal(None)
        return literal(value)

    def _state(self, node: Node) -> Written:
        name = self.call.state[node]
        if node in self.call.given.values():
            return _name(next(k for k, v in self.call.given.items() if v is node))
        self.result.state.append(name)
        return self.tree.tensor(self.call.path, name)

    def size(self, value: Any) -> Written:
        """Write a size: a number, or an expression in the names of sizes that vary."""
        if isinstance(value, int):
            return literal(value)
        written = self.axes.written(value)
        return written if written is not None else self._size_of_a_value(value)

    def _size_of_a_value(self, value: Any) -> Written:
        text = self.tree.sizes.written(value)
        for name, node in self.held.items():
            shape = node.meta["val"].shape if isinstance(node.meta["val"], torch.Tensor) else ()
            for axis, size in enumerate(shape):
                if isinstance(size, torch.SymInt) and self.tree.sizes.written(size) == text:
                    return parsed(f"{name}.shape[{axis}]")
        reason = f"this size is not that of any tensor in `{self.call.path}`"
        self.tree.problems.append(Unsupported("size", text, reason))
        return literal(None)

    def expression(self, value: Node) -> Written:
        """Write what computes a value, out of the values that it reads."""
        item = self.produced[value]
        if isinstance(item, ModuleCall):
            called = self._called(item)
            if len(item.results) == 1:
                return called
            return ast.Subscript(called, literal(item.results.index(value)), ast.Load())
        if "getitem" in str(item.target) and "built-in" in str(item.target):
            source, index = _element(item)
            made = self._operator(resolved(source)) if source not in self.names else None
            if isinstance(made, tuple):
                return made[index]
            whole = made if made is not None else _name(self.names[source])
            return ast.Subscript(whole, literal(index), ast.Load())
        made = self._operator(item)
        if isinstance(made, tuple):
            return ast.Tuple(list(made), ast.Load())
        return made

    def _operator(self, node: Node) -> Written | tuple[Written, ...]:
        target = node.target
        assert isinstance(target, torch._ops.OpOverload)
        arguments = bound(target, node.args, node.kwargs)
        values = torch.fx.node.map_arg(arguments, lambda each: each.meta["val"])
        # A tensor is a mark at first, to see how often the rule reads it.
        tensors = {
            f"operand_{name}": resolved(value)
            for name, value in arguments.items()
            if isinstance(value, Node) and not is_size(value)
        }
        made = {
            name: _name(f"operand_{name}") if f"operand_{name}" in tensors else self.written(value)
            for name, value in arguments.items()
        }
        seen = {name: described(value) for name, value in values.items()}
        try:
            result = expressions(RULES[str(target)], seen, made, described(node.meta["val"]))
        except NotImplementedError as refusal:
            problem = problem_at(node, "operator", str(target), str(refusal))
            self.tree.problems.append(problem)
            return literal(None)
        trees = result if isinstance(result, tuple) else (result,)
        read = Counter(
            each.id for tree in trees for each in ast.walk(tree) if isinstance(each, ast.Name)
        )
        operands: dict[str, Written] = {}
        for name, value in tensors.items():
            if read[name] > 1 and value in self.produced and value not in self.names:
                self._assign([value], self.expression(value), self.place)
            if read[name]:
                operands[name] = self.written(value)
        whole = tuple(with_operands(tree, operands) for tree in trees)
        return whole if isinstance(result, tuple) else whole[0]

    def _called(self, item: ModuleCall) -> Written:
        attribute = self.tree.attribute(self.call.path, item.path)
        self.result.children.append(item.path)
        return self._call_of(item, parsed(attribute))

    def _call_of(self, item: ModuleCall, module: Written) -> Written:
        found = leaf(item.module)
        if found is not None:
            operands = {"module": module, "x": self.written(next(iter(item.given.values())))}
            return filled(found.called, operands)
        positional: list[Written] = []
        keywords: list[ast.keyword] = []
        skipped = False
        for name in self.tree.signatures(item):
            if name not in item.given:
                skipped = True
            elif skipped:
                keywords.append(ast.keyword(name, self.written(item.given[name])))
            else:
                positional.append(self.written(item.given[name]))
        return ast.Call(module, positional, keywords)

    # -- statements

    def _assigned(self, value: Node, place: int) -> str:
        """Choose the name of a value, keeping what a name holds while it is still read."""
        name = self._own_name(value) or self._made_name(value)
        if not self._may_take(name, value, place):
            name = self._helper_name(value) or name
        if name in TAKEN or name in self.tree.sizes.names.values() or keyword.iskeyword(name):
            name += "_"
        held = self.held.get(name)
        if held is not None and held is not value and self._last_use(held) > place:
            frame = self._frame(self.produced[value])
            other = next((a for a, n in aliases(frame) if n == name), None) if frame else None
            if other is None or self._is_busy(other, place):
                name = self._free(f"new_{name}", place)
            else:
                self.body.append(ast.Assign([ast.Name(other, ast.Store())], _name(name)))
                self.names[held] = other
                self.held[other] = held
        self.names[value] = name
        self.held[name] = value
        return name

    def _may_take(self, name: str, value: Node, place: int) -> bool:
        held = self.held.get(name)
        return held is None or held is value or self._last_use(held) <= place

    def _is_busy(self, name: str, place: int) -> bool:
        return name in self.held and self._last_use(self.held[name]) > place

    def _free(self, name: str, place: int) -> str:
        while self._is_busy(name, place):
            name = f"new_{name}"
        return name

    def _assign(self, values: Sequence[Node], made: Written, place: int) -> None:
        names = [self._assigned(value, place) for value in values]
        targets: list[ast.expr] = [ast.Name(name, ast.Store()) for name in names]
        target = targets[0] if len(targets) == 1 else ast.Tuple(targets, ast.Store())
        self.body.append(ast.Assign([target], made))

    def _loop(self, run: list[ModuleCall], place: int) -> None:
        parent = run[0].path.rpartition(".")[0]
        carried = next(n for n, node in run[1].given.items() if node is run[0].results[0])
        start = run[0].given[carried]
        value = run[-1].results[0]
        before = self.written(start)
        name = self._own_name(run[0].results[0]) or carried
        self.produced.setdefault(value, run[-1])
        held = self.held.get(name)
        if held is not None and held is not start and self._last_use(held) > place:
            name = self._free(f"new_{name}", place)
        if not (isinstance(before, ast.Name) and before.id == name):
            self.body.append(ast.Assign([ast.Name(name, ast.Store())], before))
        elif self._last_use(start) > place:
            kept = self._free(f"first_{name}", place)
            self.body.append(ast.Assign([ast.Name(kept, ast.Store())], _name(name)))
            self.names[start], self.held[kept] = kept, start
        frame = self._frame(run[0])
        variable = (loop_variable(frame) if frame else None) or "layer"
        kept_names = dict(self.names)
        self.names[start] = name
        made = self._call_of(run[0], _name(variable))
        self.names = kept_names
        for call in run:
            self.result.children.append(call.path)
        attribute = self.tree.attribute(self.call.path, parent)
        self.body.append(
            ast.For(
                ast.Name(variable, ast.Store()),
                parsed(attribute),
                [ast.Assign([ast.Name(name, ast.Store())], made)],
                [],
            )
        )
        self.names[value], self.held[name] = name, value

    def method(self) -> Method:
        """Write the method."""
        for name, node in self.call.given.items():
            self.names[node], self.held[name] = name, node
        self.result.arguments = list(self.call.given)
        if not self.call.path:
            self._unpack()
        place = 0
        while place < len(self.items):
            item = self.items[place]
            self.place = place
            if run := self._repeated(place):
                self._loop(run, place)
                place += len(run)
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
            if isinstance(item, ModuleCall) and len(item.results) > 1:
                self._assign(item.results, self._called(item), place - 1)
                continue
            if isinstance(item, Node) and isinstance(item.meta["val"], (tuple, list)):
                self._several(item, place - 1)
                continue
            self._assign(values, self.expression(values[0]), place - 1)
        self.place = len(self.items)
        returned = self._return_value()
        self.body.append(ast.Return(returned))
        return self._finished()

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
        indices = [_element(user)[1] for user in users]
        if sorted(indices) == list(range(len(item.meta["val"]))) and len(indices) > 1:
            ordered = sorted(users, key=lambda user: _element(user)[1])
            self._assign(ordered, made, place)
            self.written_already.update(id(user) for user in ordered)
        else:
            self._assign([item], made, place)

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

    def _finished(self) -> Method:
        body = without_unread([tidied(each) for each in self.body])
        self.result.body = [*self.unpacked, *self.axes.statements(), *body]
        return self.result


def method(call: ModuleCall, tree: MethodContext) -> Method:
    """Write one call as a method."""
    return Writer(call, tree).method()
