"""One call of a module as the statements of a method, with the names of torch's own source."""

import ast
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from jax_attn.translate.calls import Call, is_size, operands, resolved
from jax_attn.translate.expression import Written, filled, literal, parsed, with_operands
from jax_attn.translate.frames import Frame, frames
from jax_attn.translate.leaves import leaf
from jax_attn.translate.rules.rule import bound, described, expressions
from jax_attn.translate.rules.table import RULES
from jax_attn.translate.sizes import Sizes
from jax_attn.translate.source_lines import (
    Statement,
    aliases,
    loop_variable,
    return_names,
    statement,
)
from jax_attn.translate.tidy import tidied, without_unread


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


@dataclass(frozen=True)
class Tree:
    """What a method must know of the rest.

    Attributes:
      sizes: names of the sizes that vary.
      state: the name of each parameter, buffer and constant.
      signatures: for each module that is a class of the file, by path: its arguments in order.
      attribute: the expression of a module from another that contains it, by both paths.
      returned: what the reference returns.
    """

    sizes: Sizes
    state: Mapping[Node, str]
    signatures: Callable[[Call], Sequence[str]]
    is_inlined: Callable[[Call], bool]
    attribute: Callable[[str, str], str]
    tensor: Callable[[str, str], Written]
    returned: Any


@dataclass(frozen=True)
class Axis:
    """An axis of an argument, and the variable that holds its size."""

    argument: str
    axis: int
    variable: str


def _name(text: str) -> Written:
    return ast.Name(text, ast.Load())


class Writer:
    """Write one call as a method. Use `method`."""

    def __init__(self, call: Call, tree: Tree) -> None:
        self.call = call
        self.tree = tree
        self.items: list[Node | Call] = []
        self._splice(call)
        self.own = {id(item) for item in self.items}
        self.produced: dict[Node, Node | Call] = {}
        for item in self.items:
            for value in item.results if isinstance(item, Call) else (item,):
                self.produced[value] = item
        self.returned = self._returned()
        self.uses = Counter[Node]()
        self.users: dict[Node, list[Node | Call | None]] = {}
        for item in self.items:
            for value in self._read(item):
                self._use(value, item)
        for value in self.returned:
            self._use(value, None)
        self.places = {id(item): self._place(item) for item in self.items}
        self.leaving: dict[Statement, list[Node]] = {}
        for value, item in self.produced.items():
            place = self.places[id(item)]
            if place is not None and any(
                user is None or self.places[id(user)] != place for user in self.users.get(value, ())
            ):
                self.leaving.setdefault(place, []).append(value)
        self.names: dict[Node, str] = {}
        self.held: dict[str, Node] = {}
        self.position = {id(item): place for place, item in enumerate(self.items)}
        self.body: list[ast.stmt] = []
        self.written_already: set[int] = set()
        self.place = 0
        self.axes = self._axes()
        self.read_sizes: dict[str, None] = {}
        self.result = Method(list(call.given), [])

    # -- what there is

    def _splice(self, call: Call) -> None:
        for step in call.steps:
            if isinstance(step, Call) and self.tree.is_inlined(step):
                self._splice(step)
            else:
                self.items.append(step)

    def _read(self, item: Node | Call) -> list[Node]:
        if isinstance(item, Call):
            return list(item.given.values())
        return operands(item)

    def _use(self, value: Node, item: Node | Call | None) -> None:
        self.uses[value] += 1
        self.users.setdefault(value, []).append(item)

    def _returned(self) -> list[Node]:
        if self.call.path:
            return self.call.results
        return [
            each
            for each in torch.utils._pytree.tree_leaves(self.tree.returned)
            if isinstance(each, Node)
        ]

    # -- torch's source

    def _first(self, item: Node | Call) -> Node | None:
        return next(item.nodes(), None) if isinstance(item, Call) else item

    def _place(self, item: Node | Call) -> Statement | None:
        frame = self._frame(item)
        return statement(frame) if frame is not None else None

    def _statement(self, item: Node | Call) -> Statement | None:
        return self.places[id(item)]

    def _frame(self, item: Node | Call) -> Frame | None:
        node = self._first(item)
        found = frames(node) if node is not None else ()
        return found[min(self.call.depth, len(found) - 1)] if found else None

    def _own_name(self, value: Node) -> str | None:
        """Return the name that torch's source gives to a value, if it gives one."""
        item = self.produced[value]
        place = self._statement(item)
        if place is None or not place.targets:
            return None
        leaving = self.leaving.get(place, [])
        if value not in leaving:
            return None
        if len(place.targets) == 1 and isinstance(item, Call) and len(item.results) > 1:
            return self._result_name(item, value)
        if len(place.targets) == 1:
            return place.targets[0] if len(leaving) == 1 or value is leaving[-1] else None
        if isinstance(item, Call) and len(item.results) > 1:
            index = item.results.index(value)
        else:
            index = leaving.index(value)
        return place.targets[index] if index < len(place.targets) else None

    def _helper_name(self, value: Node) -> str | None:
        """Return the name of a value in the helper function that computed it."""
        item = self.produced[value]
        if not isinstance(item, Node):
            return None
        stack = frames(item)
        for level in range(self.call.depth + 1, len(stack)):
            place = statement(stack[level])
            if len(place.targets) != 1 or place.targets[0] is None:
                continue
            users = [frames(user) if isinstance(user, Node) else () for user in self.users[value]]
            if any(len(other) <= level or statement(other[level]) != place for other in users):
                return place.targets[0]
        return None

    def _made_name(self, value: Node) -> str:
        if name := self._helper_name(value):
            return name
        item = self.produced[value]
        if isinstance(item, Call):
            base = self._result_name(item, value) or item.path.rpartition(".")[2]
            if base.isdigit():
                base = item.path.rsplit(".", 2)[-2]
        else:
            base = str(item.target).split(".")[1] if "." in str(item.target) else "value"
        return re.sub(r"\W|^(?=\d)", "", base.strip("_")) or "value"

    def _result_name(self, item: Call, value: Node) -> str | None:
        """Return the name that a called module returns one of several values by."""
        found = frames(value)
        if len(item.results) == 1 or len(found) <= item.depth:
            return None
        return return_names(found[item.depth], len(item.results))[item.results.index(value)]

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
        tree = parsed(self.tree.sizes.written(value))
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        if names <= set(self.axes):
            self.read_sizes.update(dict.fromkeys(names))
            return tree
        text = ast.unparse(tree)
        if text in self.axes:
            self.read_sizes.setdefault(text)
            return _name(self.axes[text].variable)
        for name, node in self.held.items():
            shape = node.meta["val"].shape if isinstance(node.meta["val"], torch.Tensor) else ()
            for axis, size in enumerate(shape):
                if isinstance(size, torch.SymInt) and self.tree.sizes.written(size) == text:
                    return parsed(f"{name}.shape[{axis}]")
        raise NotImplementedError(
            f"the size {text} is not that of any tensor in `{self.call.path}`"
        )

    def expression(self, value: Node) -> Written:
        """Write what computes a value, out of the values that it reads."""
        item = self.produced[value]
        if isinstance(item, Call):
            called = self._called(item)
            if len(item.results) == 1:
                return called
            return ast.Subscript(called, literal(item.results.index(value)), ast.Load())
        if "getitem" in str(item.target) and "built-in" in str(item.target):
            source, index = item.args
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
        result = expressions(RULES[str(target)], seen, made, described(node.meta["val"]))
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

    def _called(self, item: Call) -> Written:
        attribute = self.tree.attribute(self.call.path, item.path)
        self.result.children.append(item.path)
        return self._call_of(item, parsed(attribute))

    def _call_of(self, item: Call, module: Written) -> Written:
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

    def _is_folded(self, value: Node) -> bool:
        """Return whether a value is written where it is used, and has no statement."""
        item = self.produced[value]
        if self.uses[value] != 1:
            return False
        if isinstance(item, Call) and len(item.results) > 1:
            return False
        (user,) = self.users[value]
        if user is None:
            return True
        if self._own_name(value) is None:
            return True
        return self._statement(user) == self._statement(item)

    def _last_use(self, value: Node) -> int:
        places = [
            len(self.items) if user is None else self.position[id(user)]
            for user in self.users.get(value, ())
        ]
        # A folded user reads where its own user stands.
        for user in self.users.get(value, ()):
            if isinstance(user, Node) and user in self.produced and self._is_folded(user):
                places.append(self._last_use(user))
        return max(places, default=-1)

    def _assigned(self, value: Node, place: int) -> str:
        """Choose the name of a value, keeping what a name holds while it is still read."""
        name = self._own_name(value) or self._made_name(value)
        if not self._may_take(name, value, place):
            name = self._helper_name(value) or name
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

    def _repeated(self, place: int) -> list[Call]:
        """Return the calls from here that are one loop over a list of modules."""
        first = self.items[place]
        run: list[Call] = []
        if not isinstance(first, Call) or len(first.results) != 1:
            return run
        parent, _, index = first.path.rpartition(".")
        if not index.isdigit():
            return run
        run = [first]
        for item in self.items[place + 1 :]:
            last = run[-1]
            if not isinstance(item, Call) or item.path != f"{parent}.{int(index) + len(run)}":
                break
            if type(item.module) is not type(first.module) or set(item.given) != set(last.given):
                break
            same = all(
                node is last.given[name]
                or (
                    node is last.results[0]
                    and last.given[name]
                    is (run[-2].results[0] if len(run) > 1 else last.given[name])
                )
                for name, node in item.given.items()
            )
            carried = [n for n, node in item.given.items() if node is last.results[0]]
            if not same or len(carried) != 1 or self.uses[last.results[0]] != 1:
                break
            run.append(item)
        return run if len(run) > 1 else []

    def _loop(self, run: list[Call], place: int) -> None:
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
                for value in (item.results if isinstance(item, Call) else (item,))
                if self.uses[value]
            ]
            if id(item) in self.written_already:
                continue
            if not values or all(self._is_folded(value) for value in values):
                continue
            if isinstance(item, Call) and len(item.results) > 1:
                self._assign(item.results, self._called(item), place - 1)
                continue
            if isinstance(item.meta["val"] if isinstance(item, Node) else None, (tuple, list)):
                self._several(item, place - 1)
                continue
            self._assign(values, self.expression(values[0]), place - 1)
        self.place = len(self.items)
        returned = self._return_value()
        self.body.append(ast.Return(returned))
        return self._finished()

    def _several(self, item: Node, place: int) -> None:
        """Assign the outputs of an operator that has several, or leave them to their users."""
        users = [user for user in self.users[item] if isinstance(user, Node)]
        made = self._operator(item)
        if isinstance(made, tuple):
            return
        indices = [user.args[1] for user in users]
        if sorted(indices) == list(range(len(item.meta["val"]))) and len(indices) > 1:
            ordered = sorted(users, key=lambda user: user.args[1])
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
        self.result.body = [*self._size_statements(), *body]
        return self.result

    def _axes(self) -> "dict[str, Axis]":
        """Return where each size that varies can be read from the arguments."""
        found: dict[str, Axis] = {}
        for argument, node in self.call.given.items():
            for axis, size in enumerate(node.meta["val"].shape):
                if isinstance(size, torch.SymInt):
                    text = self.tree.sizes.written(size)
                    variable = text if text.isidentifier() else f"{argument}_size"
                    found.setdefault(text, Axis(argument, axis, variable))
        return found

    def _size_statements(self) -> list[ast.stmt]:
        """Read the sizes that are used, `B, T = x.shape[:2]`, each once."""
        by_argument: dict[str, list[Axis]] = {}
        for text, axis in self.axes.items():
            if text in self.read_sizes:
                by_argument.setdefault(axis.argument, []).append(axis)
        lines: list[str] = []
        for argument, axes in by_argument.items():
            if len(axes) > 1 and [each.axis for each in axes] == list(range(len(axes))):
                names = ", ".join(each.variable for each in axes)
                lines.append(f"{names} = {argument}.shape[:{len(axes)}]")
            else:
                lines += [f"{each.variable} = {argument}.shape[{each.axis}]" for each in axes]
        return ast.parse("\n".join(lines)).body


def method(call: Call, tree: Tree) -> Method:
    """Write one call as a method."""
    return Writer(call, tree).method()
