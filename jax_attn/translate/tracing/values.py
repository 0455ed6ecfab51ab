"""Read values of a graph: operators that do nothing, sizes, and what an operator reads."""

from typing import Any

import torch
from torch.fx import Node

# What these return is what they are given, wherever dtype and shape are the same.
_NOTHING = {
    "aten.alias.default",
    "aten.clone.default",
    "aten.contiguous.default",
    "aten.expand.default",
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
# Those whose arguments are (input, probability, whether it is training).
_DROPOUTS = {
    "aten.dropout.default",
    "aten.feature_dropout.default",
    "aten.alpha_dropout.default",
    "aten.feature_alpha_dropout.default",
}


_KEPT = "jax_attn_kept"


def keep(node: Node) -> None:
    """Let an operator count that does nothing in eval mode and something in training."""
    node.meta[_KEPT] = True


def _is_same(here: Any, there: Any) -> bool:
    """Return whether two values have one dtype and one shape; no condition on a size is made."""
    if not isinstance(here, torch.Tensor) or not isinstance(there, torch.Tensor):
        return False
    shapes = [list(map(str, value.shape)) for value in (here, there)]
    return here.dtype is there.dtype and shapes[0] == shapes[1]


def does_nothing(node: Node) -> bool:
    """Return whether an operator returns what it is given."""
    name = str(node.target)
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], Node):
        return False
    if _KEPT in node.meta:
        return False
    if name in _DROPOUTS:
        _, probability, is_training = (*node.args, *node.kwargs.values())
        return is_training is False or probability in (0, 0.0)
    return name in _NOTHING and _is_same(node.meta.get("val"), node.args[0].meta.get("val"))


def resolved(node: Node) -> Node:
    """Follow operators that do nothing back to the value that they return."""
    while does_nothing(node):
        source = node.args[0]
        assert isinstance(source, Node)
        node = source
    return node


def is_size(node: Node) -> bool:
    """Return whether a value of the graph is a number, such as a size, and no tensor."""
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool, int))


def tensors_of(value: Any) -> list[Node]:
    """Return the tensors in an argument or a tree of these, without operators that do nothing.

    A function in the graph, which `torch.cond` runs, is no tensor.
    """
    found: list[Node] = []
    torch.fx.node.map_arg(value, lambda node: found.append(node))
    return [resolved(node) for node in found if not is_size(node) and node.op != "get_attr"]


def operands(node: Node) -> list[Node]:
    """Return the tensors that an operator reads."""
    return tensors_of((node.args, node.kwargs))
