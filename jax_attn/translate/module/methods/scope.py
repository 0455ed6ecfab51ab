"""Tell of the values of one call who reads them, and what torch's own source names them."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from jax_attn.translate.module.methods.axes import Place
from jax_attn.translate.rules.expression import Written
from jax_attn.translate.tracing.calls import ModuleCall
from jax_attn.translate.tracing.export.sizes import NamedSizes
from jax_attn.translate.tracing.problems import Unsupported
from jax_attn.translate.tracing.source.frames import Frame, frames
from jax_attn.translate.tracing.source.source_lines import Statement, return_names, statement
from jax_attn.translate.tracing.values import operands


@dataclass(frozen=True)
class MethodContext:
    """Hold what a method must know of the rest.

    Attributes:
      sizes: names of the sizes that vary.
      state: the name of each parameter, buffer and constant.
      signatures: the arguments of a call whose module is a class of the file, in order.
      axis_names: the variables of sizes that differ between the calls of a class.
      is_training: whether the values are those of training mode.
      choices: what a call passes that is no tensor and tells calls of one module apart, by name.
      is_inlined: whether a call is written where it stands.
      functions: the name and the parameters of a function of the file, by a call of it.
      taken: names that mean something else in the file.
      outputs: the values that a call returns, None in the places of other calls of its class.
      position: which element of what torch's forward returns an output of a call is.
      dropout: the attribute of a module that drops at a rate.
      attribute: the expression of a module from another that contains it, by both paths.
      returned: what the reference returns.
      problems: what rules refuse, filled in as methods are written.
    """

    sizes: NamedSizes
    state: Mapping[Node, str]
    is_training: bool
    signatures: Callable[[ModuleCall], Sequence[str]]
    axis_names: Callable[[ModuleCall], Mapping[Place, str]]
    choices: Callable[[ModuleCall], Mapping[str, Any]]
    is_inlined: Callable[[ModuleCall], bool]
    functions: Callable[[ModuleCall], tuple[str, Sequence[str]]]
    taken: set[str]
    outputs: Callable[[ModuleCall], list[Node | None]]
    position: Callable[[ModuleCall, int], int | None]
    attribute: Callable[[str, str], str]
    members: Callable[[str, Sequence[str]], Written]
    tensor: Callable[[str, str], Written]
    dropout: Callable[[str, float], str]
    returned: Any
    problems: list[Unsupported]


class MethodScope:
    """Hold what happens in one call, with the calls that are written in it.

    Attributes:
      items: operators and calls, in order.
      produced: the item that each value comes from.
      users: the items that read a value; None stands for what the call returns.
      uses: how often a value is read.
      passed: the name by which a value is first passed on.
      names: the names of the values that have one.
      held: the value that each name holds at the statement at hand.
      assigned: the names that statements so far assign.
    """

    def __init__(self, call: ModuleCall, tree: MethodContext) -> None:
        self.call = call
        self.tree = tree
        self.items: list[Node | ModuleCall] = []
        self.passed: dict[Node, str] = {}
        self._splice(call)
        self.produced: dict[Node, Node | ModuleCall] = {}
        for item in self.items:
            for value in item.results if isinstance(item, ModuleCall) else (item,):
                self.produced[value] = item
        self.returned = self._returned()
        self.uses = Counter[Node]()
        self.users: dict[Node, list[Node | ModuleCall | None]] = {}
        for item in self.items:
            read = item.given.values() if isinstance(item, ModuleCall) else operands(item)
            for value in read:
                self._use(value, item)
        for returned in self.returned:
            if returned is not None:
                self._use(returned, None)
        framed = {id(item): self._frame(item) for item in self.items}
        self.places = {key: frame and statement(frame) for key, frame in framed.items()}
        self.leaving: dict[Statement, list[Node]] = {}
        for value, item in self.produced.items():
            place = self.places[id(item)]
            if place is not None and any(
                user is None or self.places[id(user)] != place for user in self.users.get(value, ())
            ):
                self.leaving.setdefault(place, []).append(value)
        self.names: dict[Node, str] = {}
        self.held: dict[str, Node] = {}
        self.assigned: set[str] = set()
        self.position = {id(item): place for place, item in enumerate(self.items)}

    # -- what there is

    def _splice(self, call: ModuleCall) -> None:
        for step in call.steps:
            for name, node in step.given.items() if isinstance(step, ModuleCall) else ():
                self.passed.setdefault(node, name)
            if isinstance(step, ModuleCall) and self.tree.is_inlined(step):
                self._splice(step)
            else:
                self.items.append(step)

    def _use(self, value: Node, item: Node | ModuleCall | None) -> None:
        self.uses[value] += 1
        self.users.setdefault(value, []).append(item)

    def _returned(self) -> Sequence[Node | None]:
        if self.call.path:
            return self.tree.outputs(self.call)
        return [
            each
            for each in torch.utils._pytree.tree_leaves(self.tree.returned)
            if isinstance(each, Node)
        ]

    # -- torch's source

    def _first(self, item: Node | ModuleCall) -> Node | None:
        return next(item.nodes(), None) if isinstance(item, ModuleCall) else item

    def _statement(self, item: Node | ModuleCall) -> Statement | None:
        return self.places[id(item)]

    def _frame(self, item: Node | ModuleCall) -> Frame | None:
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
        if isinstance(item, ModuleCall) and len(outputs := self.tree.outputs(item)) > 1:
            return self._output_name(item, outputs.index(value))
        if len(place.targets) == 1:
            return place.targets[0] if len(leaving) == 1 or value is leaving[-1] else None
        index = leaving.index(value)
        return place.targets[index] if index < len(place.targets) else None

    def _output_name(self, item: ModuleCall, index: int) -> str | None:
        """Return the name that torch's source gives to one of several outputs of a call."""
        place = self._statement(item)
        position = self.tree.position(item, index)
        targets = place.targets if place is not None else ()
        if len(targets) > 1:
            if position is not None and len(targets) == len(item.returned):
                return targets[position]
            return targets[index] if index < len(targets) else None
        return self._result_name(item, index)

    def _helper_name(self, value: Node) -> str | None:
        """Return the name of a value in the helper function that computed it."""
        item = self.produced[value]
        if isinstance(item, ModuleCall) and len(self.tree.outputs(item)) > 1:
            return None
        stack = self._stack(item)
        for level in range(self.call.depth + 1, len(stack)):
            place = statement(stack[level])
            target = self._target(item, place.targets)
            if target is None:
                continue
            users = [self._stack(user) if user is not None else () for user in self.users[value]]
            if any(len(other) <= level or statement(other[level]) != place for other in users):
                return target
        return None

    def _stack(self, item: Node | ModuleCall) -> tuple[Frame, ...]:
        """Return the frames in which an operator ran, or a module or a function was called."""
        node = self._first(item)
        stack = frames(node) if node is not None else ()
        return stack[: item.depth] if isinstance(item, ModuleCall) else stack

    def _target(self, item: Node | ModuleCall, targets: Sequence[str | None]) -> str | None:
        """Return which of the names that a statement assigns is that of an item's result."""
        if len(targets) == 1:
            return targets[0]
        source = item.args[0] if isinstance(item, Node) and item.args else None
        if not isinstance(item, Node) or not isinstance(source, Node):
            return None
        if not isinstance(source.meta["val"], (list, tuple)):
            return None
        index = item.args[1]
        assert isinstance(index, int)
        return targets[index] if len(targets) == len(source.meta["val"]) else None

    def _made_name(self, value: Node) -> str:
        if name := self._helper_name(value):
            return name
        item = self.produced[value]
        if isinstance(item, ModuleCall):
            outputs = self.tree.outputs(item)
            name = self._output_name(item, outputs.index(value)) if len(outputs) > 1 else None
            base = name or item.path.rpartition(".")[2]
            if item.function is not None:
                base = name or f"{item.function.__name__}_result"
            if base.isdigit():
                base = item.path.rsplit(".", 2)[-2]
        elif value in self.passed:
            base = self.passed[value]
        else:
            base = str(item.target).split(".")[1] if "." in str(item.target) else "value"
        return re.sub(r"\W|^(?=\d)", "", base.strip("_")) or "value"

    def _result_name(self, item: ModuleCall, index: int) -> str | None:
        """Return the name that a called module returns one of several values by."""
        found = next((frames(value) for value in item.results), ())
        if len(found) <= item.depth:
            return None
        position = self.tree.position(item, index)
        if position is not None:
            return return_names(found[item.depth], len(item.returned))[position]
        return return_names(found[item.depth], len(item.results))[index]

    def _is_folded(self, value: Node) -> bool:
        """Return whether a value is written where it is used, and has no statement."""
        item = self.produced[value]
        if self.uses[value] != 1:
            return False
        if isinstance(item, ModuleCall) and len(self.tree.outputs(item)) > 1:
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
        # A folded user, an operator or a call, reads where its own user stands.
        for user in self.users.get(value, ()):
            for made in user.results if isinstance(user, ModuleCall) else (user,):
                if made is not None and made in self.produced and self._is_folded(made):
                    places.append(self._last_use(made))
        return max(places, default=-1)
