"""Read a graph as a tree of calls: each call of a module with what it did, in order."""

import inspect
import keyword
import re
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from jax_attn.translate.rules.written import TAKEN
from jax_attn.translate.tracing.export.exported import Exported
from jax_attn.translate.tracing.export.marks import MARK, named_leaves, read, with_leaves
from jax_attn.translate.tracing.source.frames import Frame, forward_frame, frames
from jax_attn.translate.tracing.source.source_lines import unpacked
from jax_attn.translate.tracing.values import does_nothing, is_size, keep, operands, resolved


@dataclass(eq=False)
class ModuleCall:
    """Hold one call of a module.

    Attributes:
      path: the module's name in the reference, the first of several; the reference's own is empty.
      module: the module.
      depth: which of `frames(node)` is this call's own forward; those after it are the helpers
        in which an operator ran.
      steps: operators and calls of other modules, in the order in which they ran.
      given: the values that it is given, by names made from forward's arguments, in their order.
        A tensor in a sequence is `<argument>_<index>`, one in a dict `<argument>_<key>`.
      results: the values of it that others use, in the order in which forward returns them.
      state: parameters, buffers and constants that are read in it or below, by their node; a tied
        tensor goes by the name that it has in this module, if it has one there.
      is_foreign: whether the module belongs to none of those whose calls surround it.
      arguments: what forward is given, a tree by argument whose leaves are nodes or constants.
      returned: what forward returns, a tree; None in place of a value that nobody reads.
      function: the function of torch's source that is called in place of a module. `module` is
        then the one that calls it, and all that is said of forward holds for the function.
    """

    path: str
    module: torch.nn.Module
    depth: int
    steps: "list[Node | ModuleCall]" = field(default_factory=list)
    given: dict[str, Node] = field(default_factory=dict)
    results: list[Node] = field(default_factory=list)
    state: dict[Node, str] = field(default_factory=dict)
    is_foreign: bool = False
    arguments: dict[str, Any] = field(default_factory=dict)
    returned: Any = None
    function: Callable[..., Any] | None = None

    @property
    def forward(self) -> Callable[..., Any]:
        """Return what is called, without its decorators."""
        return inspect.unwrap(self.function or self.module.forward)

    def unpacked_name(self, argument: str, index: int) -> str | None:
        """Return the name that forward unpacks an element of an argument into, if it does."""
        code = self.forward.__code__
        parts = unpacked(code.co_filename, code.co_firstlineno, code.co_name, argument)
        return parts[index] if len(parts) == len(self.arguments[argument]) else None

    def calls_modules(self) -> bool:
        """Return whether a module is called in it, or below it."""
        steps = [step for step in self.steps if isinstance(step, ModuleCall)]
        return any(step.function is None or step.calls_modules() for step in steps)

    def nodes(self) -> Iterator[Node]:
        """Iterate over the operators of the call and of all calls below it."""
        for step in self.steps:
            if isinstance(step, ModuleCall):
                yield from step.nodes()
            else:
                yield step


def is_below(path: str, around: str) -> bool:
    """Return whether a name is that of something inside a module."""
    return not around or path.startswith(f"{around}.")


def nodes_of(arguments: Mapping[str, Any]) -> Iterator[tuple[str, Node]]:
    """Iterate over the values in forward's arguments, each with the name that it gets."""
    for argument, tree in arguments.items():
        for name, leaf in named_leaves(argument, tree):
            if isinstance(leaf, Node):
                yield name, leaf


def leaves_of(tree: Any) -> list[Node]:
    return [leaf for _, leaf in named_leaves("", tree) if isinstance(leaf, Node)]


def steps(call: ModuleCall) -> Iterator[Node | ModuleCall]:
    """Iterate over the steps of a call, those too of the functions that it calls."""
    for step in call.steps:
        if isinstance(step, ModuleCall) and step.function is not None:
            yield from steps(step)
        else:
            yield step


def call_tree(
    export: Exported, reference: torch.nn.Module, working: Container[str] = ()
) -> ModuleCall:
    """Read the calls from the marks of a graph.

    working: the modules in which something runs in training mode, by path: their calls stay where
    nothing runs in eval mode.
    """
    modules = dict(reference.named_modules(remove_duplicate=False))
    first = {id(module): name for name, module in reference.named_modules()}
    root = ModuleCall("", reference, 0)
    callers: dict[ModuleCall, tuple[Frame, ...]] = {}
    # The calls that are open, each with its number in the marks.
    stack: list[tuple[int, ModuleCall]] = []
    outside: list[Node] = []
    for node in export.program.graph.nodes:
        if node.op != "call_function":
            continue
        if node.target is not MARK:
            if stack and _drops(stack[-1][1]):
                keep(node)
            if stack and not is_size(node) and not does_nothing(node):
                stack[-1][1].steps.append(node)
            elif not stack:
                outside.append(node)
            continue
        number, is_end = node.args[0], node.args[1]
        assert isinstance(number, int)
        assert isinstance(is_end, bool)
        tree = read(export.marks[number, is_end], node, _value)
        if is_end:
            while stack:
                closed, call = stack.pop()
                if closed == number:
                    call.returned = _dropped(export.program, node, call, tree)
                    if call.path in working and not call.steps:
                        call.returned = _handed_back(call, node)
                    break
            continue
        function = export.marks[number, is_end].function
        if not stack:
            call = root
        elif function is not None:
            around = stack[-1][1]
            call = ModuleCall(f"{function.__name__}()", around.module, 0, function=function)
            call.is_foreign = around.is_foreign
            around.steps.append(call)
        else:
            path = [value[0] for value in node.meta["nn_module_stack"].values()][-1]
            call = ModuleCall(first[id(modules[path])], modules[path], 0)
            around = next(call for _, call in reversed(stack) if call.function is None)
            call.is_foreign = around.is_foreign or not is_below(call.path, around.path)
            stack[-1][1].steps.append(call)
        call.arguments = tree
        callers[call] = frames(node)
        stack.append((number, call))
    # What brings views up to date for the program's outputs runs after the reference returned.
    root.steps += [node for node in outside if not is_size(node) and not does_nothing(node)]
    for call in [root, *callers]:
        _find_forward(call, callers)
    for call in [root, *callers]:
        call.steps = list(_without_functions_of_modules(call))
    return root


def _without_functions_of_modules(call: ModuleCall) -> "Iterator[Node | ModuleCall]":
    """Iterate over the steps of a call, those too of functions that call modules."""
    for step in call.steps:
        if isinstance(step, ModuleCall) and step.function is not None and step.calls_modules():
            yield from _without_functions_of_modules(step)
        else:
            yield step


def _drops(call: ModuleCall) -> bool:
    """Return whether a call is that of a dropout, which is called in the file too."""
    if type(call.module) is not torch.nn.Dropout or call.function is not None:
        return False
    return call.module.p > 0 and not call.is_foreign


def _dropped(program: ExportedProgram, end: Node, call: ModuleCall, returned: Any) -> Any:
    """Return what a call returns; a dropout in place leaves no operator, and is given one.

    Whoever reads the value afterwards reads what is left of it.
    """
    if not _drops(call) or call.steps or not isinstance(returned, Node):
        return returned
    if returned.op == "placeholder":
        return returned
    graph = program.graph
    with graph.inserting_before(end):
        made = graph.call_function(torch.ops.aten.clone.default, (returned,))
    made.meta = {**end.meta, "val": returned.meta["val"]}
    keep(made)
    later = set()
    node = end
    while node.op != "root":
        later.add(node)
        node = node.next
    returned.replace_all_uses_with(made, delete_user_cb=later.__contains__)
    program.graph_signature.replace_all_uses(returned.name, made.name)
    call.steps.append(made)
    return made


def _handed_back(call: ModuleCall, end: Node) -> Any:
    """Return what a call hands back as it came, as a value of its own."""
    (values,) = end.args[2:3]
    assert isinstance(values, (list, tuple))
    for value in values:
        assert isinstance(value, Node)
        if value.target is torch.ops.aten.alias.default:
            keep(value)
            call.steps.append(value)
    return call.steps[0] if len(values) == len(call.steps) == 1 else call.returned


def _value(node: Any) -> Any:
    if not isinstance(node, Node):
        return node
    return node if is_size(node) else resolved(node)


def _find_forward(call: ModuleCall, callers: Mapping[ModuleCall, tuple[Frame, ...]]) -> None:
    """Count the frames down to forward's own, those of decorators too."""
    outside = call.depth = len(callers[call])
    for step in call.steps:
        stack = callers[step] if isinstance(step, ModuleCall) else frames(step)
        if stack[:outside] == callers[call] and len(stack) > outside:
            call.depth = forward_frame(call.forward, stack, outside)
            return


def erase_marks(program: ExportedProgram) -> None:
    for node in list(program.graph.nodes):
        if node.target is MARK:
            program.graph.erase_node(node)
    program.graph.eliminate_dead_code()
    program.graph_module.recompile()


def connect(
    call: ModuleCall,
    state: Mapping[Node, list[str]],
    constants: set[str],
    used_outside: set[Node],
) -> None:
    """Fill in what a call is given and returns, from the flow of its values."""
    inside = set(call.nodes())
    read: dict[Node, None] = {}
    for node in call.nodes():
        read.update(dict.fromkeys(operands(node)))
    if not call.path and call.function is None:  # the reference may return its state as it is
        read.update(dict.fromkeys(node for node in leaves_of(call.returned) if node in state))
    own = {
        node: [name for name in state[node] if is_below(name, call.path) or name in constants]
        for node in read
        if node in state
    }
    # A tied tensor goes by the name that it has in this module.
    call.state = {node: (names or state[node])[0] for node, names in own.items()}
    given = [node for node in read if node not in inside and not own.get(node)]
    names = {
        node: "_".join(call.state[node].rsplit(".", 2)[-2:]) for node in given if node in call.state
    }
    for name, node in reversed(list(nodes_of(call.arguments))):
        names[node] = name
    ordered = [node for _, node in nodes_of(call.arguments) if node in set(given)]
    call.given = {}
    for node in dict.fromkeys([*ordered, *given]):
        name = names.get(node, node.name)
        # A part of one argument may have the name of another argument.
        is_whole = call.arguments.get(name) is node
        others = call.given if is_whole else {*call.given, *call.arguments}
        call.given[_argument(name, others)] = node
    call.returned = with_leaves(call.returned, _living)
    places = {node: place for place, node in reversed(list(enumerate(leaves_of(call.returned))))}
    call.results = sorted(
        (node for node in call.nodes() if node in used_outside),
        key=lambda node: places.get(node, len(places)),
    )
    for child in call.steps:
        if not isinstance(child, ModuleCall):
            continue
        below = set(child.nodes())
        used = set(used_outside)
        for node in inside - below:
            used.update(operands(node))
        connect(child, state, constants, used & below)
    if call.path:
        _rename(call)


def _argument(name: str, others: Container[str]) -> str:
    """Return a name that an argument may have beside others in the file."""
    name = re.sub(r"\W", "_", name)
    while name in others or name in TAKEN or keyword.iskeyword(name):
        name += "_"
    return name


def _rename(call: ModuleCall) -> None:
    """Name `<argument>_<index>` as forward unpacks it, or as a called module does."""
    for name, node in list(call.given.items()):
        argument, _, index = name.rpartition("_")
        if argument not in call.arguments or not index.isdigit():
            continue
        below = (
            other
            for child in call.steps
            if isinstance(child, ModuleCall)
            for other, value in child.given.items()
            if value is node
        )
        other = call.unpacked_name(argument, int(index)) or next(below, None)
        if other is not None and _argument(other, call.given) == other:
            call.given = {
                other if value is node else key: value for key, value in call.given.items()
            }


def _living(leaf: Any) -> Any:
    """Return a leaf of a tree, or None in place of a value that nobody reads."""
    return None if isinstance(leaf, Node) and leaf._erased else leaf


def drop_erased(call: ModuleCall) -> None:
    """Leave out what nobody reads, and calls in which nothing runs, such as dropout's."""
    for step in call.steps:
        if isinstance(step, ModuleCall):
            drop_erased(step)
    call.steps = [
        step
        for step in call.steps
        if (next(step.nodes(), None) if isinstance(step, ModuleCall) else _living(step)) is not None
    ]
    call.arguments = with_leaves(call.arguments, _living)
