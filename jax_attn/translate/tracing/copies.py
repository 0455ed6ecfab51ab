"""What a functional graph has in place of `copy_`, in operators that have a derivative."""

from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

_COPY = torch.ops.aten.copy.default


def replace_copies(program: ExportedProgram) -> None:
    """Write each `copy(into, source)` as `source`, in the dtype and the shape of `into`."""
    graph = program.graph
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not _COPY:
            continue
        into, source = node.args[:2]
        value, there = node.meta["val"], source.meta["val"]
        with graph.inserting_before(node):
            if there.dtype != value.dtype:
                options = {"dtype": value.dtype}
                made = there.to(value.dtype)
                source = _made(node, torch.ops.aten._to_copy.default, (source,), options, made)
            if list(map(str, there.shape)) != list(map(str, value.shape)):
                sizes = [_size(node, into, axis) for axis in range(value.ndim)]
                source = _made(node, torch.ops.aten.expand.default, (source, sizes), {}, value)
        node.replace_all_uses_with(source)
        program.graph_signature.replace_all_uses(node.name, source.name)
        graph.erase_node(node)
    program.graph_module.recompile()


def _made(node: Node, operator: Any, args: Any, kwargs: Any, value: Any) -> Node:
    made = node.graph.call_function(operator, args, kwargs)
    made.meta = {**node.meta, "val": value}
    return made


def _size(node: Node, into: Node, axis: int) -> Any:
    size = into.meta["val"].shape[axis]
    if isinstance(size, int):
        return size
    return _made(node, torch.ops.aten.sym_size.int, (into, axis), {}, size)
