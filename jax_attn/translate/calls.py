"""The graph of a program as a tree of calls: each call of a module with what it did, in order."""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node
from torch.utils._pytree import TreeSpec, tree_unflatten

from jax_attn.translate.source_lines import unpacked

# What these return is what they are given, wherever dtype and shape are the same.
_NOTHING = {
    "aten.alias.default",
    "aten.clone.default",
    "aten.contiguous.default",
    "aten.dropout.default",
    "aten.expand.default",
    "aten.feature_dropout.default",
    "aten.lift_fresh_copy.default",
    "aten._to_copy.default",
    "aten.to.dtype",
    "aten.to.device",
    "aten.to.dtype_layout",
    "aten.slice.Tensor",
    "aten.view.default",
    "aten.reshape.default",
    "aten._unsafe_view.default",
}


@dataclass(eq=False)
class Call:
    """One call of a module.

    Attributes:
      path: the module's name in the reference; the reference's own is empty.
      module: the module.
      steps: operators and calls of other modules, in the order in which they ran.
      given: the values that it is given, by names made from forward's arguments, in their order.
      results: the values of it that others use, in the order in which forward returns them.
      state: parameters, buffers and constants that are read in it or below, by their node.
      is_foreign: whether the module belongs to none of those whose calls surround it.
    """

    path: str
    module: torch.nn.Module
    depth: int
    steps: "list[Node | Call]" = field(default_factory=list)
    given: dict[str, Node] = field(default_factory=dict)
    results: list[Node] = field(default_factory=list)
    state: dict[Node, str] = field(default_factory=dict)
    is_foreign: bool = False

    def nodes(self) -> Iterator[Node]:
        """Iterate over the operators of the call and of all calls below it."""
        for step in self.steps:
            if isinstance(step, Call):
                yield from step.nodes()
            else:
                yield step


@dataclass(frozen=True)
class Traced:
    """A program as a tree of calls.

    Attributes:
      root: the call of the reference.
      state: every parameter, buffer and constant of the graph: its node and its name.
      returned: what the reference returned, a tree whose leaves are nodes or constants.
    """

    root: Call
    state: Mapping[Node, str]
    returned: Any
    program: ExportedProgram


def resolved(node: Node) -> Node:
    """Follow operators that do nothing back to the value that they return."""
    while node.op == "call_function" and str(node.target) in _NOTHING:
        source = node.args[0]
        assert isinstance(source, Node)
        here, there = node.meta["val"], source.meta["val"]
        if here.shape != there.shape or here.dtype != there.dtype:
            break
        node = source
    return node


def is_size(node: Node) -> bool:
    """Return whether a value of the graph is a number, such as a size, and no tensor."""
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool, int))


def _flat(value: Any) -> list[Node]:
    found: list[Node] = []
    torch.fx.node.map_arg(value, lambda node: found.append(node))
    return [resolved(node) for node in found if not is_size(node)]


def operands(node: Node) -> list[Node]:
    """Return the tensors that an operator reads."""
    return _flat((node.args, node.kwargs))


def is_below(path: str, around: str) -> bool:
    """Return whether a name is that of something inside a module."""
    return not around or path.startswith(f"{around}.")


def traced(program: ExportedProgram, reference: torch.nn.Module) -> Traced:
    """Arrange the graph of a program as a tree of calls."""
    modules = dict(reference.named_modules(remove_duplicate=False))
    first_names = {id(module): name for name, module in reversed(list(reference.named_modules()))}
    root = Call("", reference, 0)
    state: dict[Node, str] = {}
    by_name = {node.name: node for node in program.graph.nodes}
    for spec in program.graph_signature.input_specs:
        if spec.kind != InputKind.USER_INPUT:
            state[by_name[spec.arg.name]] = spec.target
    # The calls that are open: the key of each in a node's stack, with the call.
    open_calls: list[tuple[str, Call]] = [("", root)]
    calls: dict[str, Call] = {"": root}
    output: Any = ()
    for node in program.graph.nodes:
        if node.op == "output":
            output = node.args[0]
        if node.op != "call_function" or is_size(node) or "_assert" in str(node.target):
            continue
        if resolved(node) is not node:
            continue
        stack = [(key, value[0]) for key, value in (node.meta.get("nn_module_stack") or {}).items()]
        stack = [entry for entry in stack if entry[1] in modules and entry[1]]
        same = 0
        while (
            same < len(stack)
            and same + 1 < len(open_calls)
            and open_calls[same + 1][0] == stack[same][0]
        ):
            same += 1
        del open_calls[same + 1 :]
        for key, path in stack[same:]:
            canonical = first_names[id(modules[path])]
            call = Call(canonical, modules[path], len(open_calls))
            around = open_calls[-1][1]
            call.is_foreign = around.is_foreign or not is_below(canonical, around.path)
            open_calls[-1][1].steps.append(call)
            open_calls.append((key, call))
            suffix = "@" + key.rsplit("@", 1)[1] if "@" in key else ""
            calls.setdefault(path + suffix, call)
        open_calls[-1][1].steps.append(node)
    _connect(root, state, {resolved(node) for node in _flat(output)})
    for entry in program.module_call_graph:
        if entry.signature is not None and entry.fqn in calls and entry.fqn:
            _name(calls[entry.fqn], entry.signature, by_name)
    results = [
        resolved(node) if isinstance(node, Node) else node
        for node in torch.utils._pytree.tree_leaves(output)
    ]
    user = [
        result
        for result, spec in zip(results, program.graph_signature.output_specs, strict=True)
        if spec.kind.name == "USER_OUTPUT"
    ]
    out_spec = program.call_spec.out_spec
    root.results = list(dict.fromkeys(each for each in user if isinstance(each, Node)))
    inputs = [
        spec.arg.name
        for spec in program.graph_signature.input_specs
        if spec.kind == InputKind.USER_INPUT
    ]
    root.given = {name: by_name[name] for name in inputs if name in by_name}
    return Traced(root, state, _plain(user, out_spec), program)


def _plain(leaves: list[Any], spec: TreeSpec | None) -> Any:
    """Return leaves as forward returned them, with dicts in place of classes with fields."""
    if spec is None or len(leaves) != spec.num_leaves:
        return leaves[0] if len(leaves) == 1 else tuple(leaves)
    if spec.type not in (tuple, list, dict, None) and not spec.is_leaf():
        children = []
        position = 0
        for child in spec.children():
            children.append(_plain(leaves[position : position + child.num_leaves], child))
            position += child.num_leaves
        context = spec.context
        return dict(zip(context if isinstance(context, list) else [], children, strict=False))
    return tree_unflatten(leaves, spec)


def _connect(call: Call, state: Mapping[Node, str], used_outside: set[Node]) -> None:
    """Fill in what a call is given and returns, from the flow of its values."""
    inside = set(call.nodes())
    read: dict[Node, None] = {}
    for node in call.nodes():
        read.update(dict.fromkeys(operands(node)))
    call.state = {node: state[node] for node in read if node in state}
    call.given = {
        node.name: node
        for node in read
        if node not in inside
        and not (node in state and (is_below(state[node], call.path) or "." not in state[node]))
    }
    call.results = [node for node in call.nodes() if node in used_outside]
    children = [step for step in call.steps if isinstance(step, Call)]
    for child in children:
        own = set(child.nodes())
        used = set(used_outside)
        for node in inside - own:
            used.update(operands(node))
        _connect(child, state, used & own)


def _name(call: Call, signature: Any, by_name: Mapping[str, Node]) -> None:
    """Name what a call is given as forward's arguments are named, and order what it returns."""

    def leaf(argument: Any) -> Any:
        node = by_name.get(argument.name)
        return node if node is None or is_size(node) else resolved(node)

    leaves = [leaf(argument) for argument in signature.inputs]
    args, kwargs = tree_unflatten(leaves, signature.in_spec)
    try:
        bound = inspect.signature(call.module.forward).bind(*args, **kwargs).arguments
    except TypeError:
        bound = {}
    names: dict[Node, str] = {}
    for name, value in bound.items():
        nodes = [node for node in torch.utils._pytree.tree_leaves(value) if node is not None]
        code = call.module.forward.__code__
        parts = unpacked(code.co_filename, code.co_firstlineno + 1, name)
        for index, node in enumerate(nodes):
            part = parts[index] if len(parts) == len(nodes) else None
            names.setdefault(node, name if len(nodes) == 1 else part or f"{name}_{index}")
    names |= {
        node: "_".join(call.state[node].rsplit(".", 2)[-2:])
        for node in call.given.values()
        if node in call.state
    }
    unnamed = [node for node in call.given.values() if node not in names]
    ordered = [node for node in names if node in call.given.values()]
    call.given = {names[node]: node for node in ordered} | {node.name: node for node in unnamed}
    returned = [leaf(argument) for argument in signature.outputs]
    places = {node: place for place, node in reversed(list(enumerate(returned)))}
    call.results.sort(key=lambda node: places.get(node, len(places)))
