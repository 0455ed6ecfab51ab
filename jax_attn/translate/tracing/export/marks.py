"""Mark in a graph where a module, or a function of its source, is called and where it returns.

An operator without a result reads what forward is given and what it returns. It takes part in
making the graph functional, so afterwards it reads the very values that forward got: views are
up to date, in-place operators done. Hooks record it, and functions that stand in for those of the
source; the reference is left as it was.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from jax_attn.translate.tracing.private import is_vectorized, keep
from jax_attn.translate.tracing.source.helpers import helpers

LIBRARY = torch.library.Library("jax_attn", "FRAGMENT")
LIBRARY.define("mark(int call, bool is_end, Tensor[] tensors, SymInt[] sizes) -> ()")
LIBRARY.impl("mark", lambda call, is_end, tensors, sizes: None, "CompositeExplicitAutograd")
torch.library.register_fake(
    "jax_attn::mark", lambda call, is_end, tensors, sizes: None, lib=LIBRARY
)
MARK = torch.ops.jax_attn.mark.default
keep(MARK)


@dataclass(frozen=True)
class MarkSlot:
    """Stand in a tree for the tensor, or the size, at a position of a mark's operands."""

    index: int
    is_size: bool = False


@dataclass(frozen=True)
class Marked:
    """Hold what a mark says.

    Attributes:
      tree: what forward is given, by the names of its arguments, or what it returns; tensors and
        sizes are slots.
      function: the function that is called, if it is no module.
    """

    tree: Any
    function: Callable[..., Any] | None = None


Marks = dict[tuple[int, bool], Marked]


def with_leaves(tree: Any, replace: Callable[[Any], Any]) -> Any:
    """Replace each leaf of a tree of sequences, mappings and dataclasses.

    Mappings and dataclasses become dicts, named tuples tuples.
    """
    if isinstance(tree, Mapping):
        return {key: with_leaves(value, replace) for key, value in tree.items()}
    if isinstance(tree, list):
        return [with_leaves(value, replace) for value in tree]
    if isinstance(tree, tuple):
        return tuple(with_leaves(value, replace) for value in tree)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, (type, MarkSlot)):
        return {
            each.name: with_leaves(getattr(tree, each.name), replace)
            for each in dataclasses.fields(tree)
        }
    return replace(tree)


def named_leaves(name: str, tree: Any, between: str = "_") -> Iterator[tuple[str, Any]]:
    """Name the leaves of an argument: `states_0`, `states_1` of a sequence, `masks_full` of a dict.

    The name of a leaf does not depend on what the other leaves are. Two names may be equal, as a
    key may contain an underscore, unless `between` is what no key contains.
    """
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from named_leaves(f"{name}{between}{key}", value, between)
    elif isinstance(tree, (list, tuple)):
        for index, value in enumerate(tree):
            yield from named_leaves(f"{name}{between}{index}", value, between)
    else:
        yield name, tree


def bound(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what forward is given by the names of its arguments, what `**kwargs` takes too."""
    signature = inspect.signature(forward)
    arguments = dict(signature.bind(*args, **kwargs).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            arguments.update(arguments.pop(name, {}))
    return arguments


def _holds(tree: Any, kinds: type | tuple[type, ...]) -> bool:
    return any(isinstance(leaf, kinds) for leaf in torch.utils._pytree.tree_leaves(tree))


@contextmanager
def marked(reference: torch.nn.Module, reading: Container[torch.nn.Module] = ()) -> Iterator[Marks]:
    """Let every call of a module, and of a function of its source, leave marks in the graph.

    reading: the modules that have read `training`. What these hand back as it came is an alias in
    the graph, as it may be another value in the other mode.
    """
    marks: Marks = {}
    hooks: list[Any] = []
    open_calls: list[int] = []
    count = 0

    def mark(is_end: bool, tree: Any, function: Callable[..., Any] | None = None) -> None:
        tensors: list[torch.Tensor] = []
        sizes: list[torch.SymInt] = []

        def slot(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor):
                tensors.append(leaf)
                return MarkSlot(len(tensors) - 1)
            if isinstance(leaf, torch.SymInt):
                sizes.append(leaf)
                return MarkSlot(len(sizes) - 1, True)
            return leaf

        marks[open_calls[-1], is_end] = Marked(with_leaves(tree, slot), function)
        MARK(open_calls[-1], is_end, tensors, sizes)

    def enter(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal count
        open_calls.append(count)
        count += 1
        try:
            mark(False, bound(module.forward, args, kwargs))
        except TypeError:
            # Forward refuses these arguments itself, with a better message.
            mark(False, {})

    def leave(module: torch.nn.Module, args: Any, kwargs: Any, result: Any) -> Any:
        # A dropout in place is its own case: it changes what it is given in training mode.
        is_same = any(result is each for each in (*args, *kwargs.values()))
        if is_same and module in reading and type(module) is not torch.nn.Dropout:
            result = torch.ops.aten.alias.default(result)
        mark(True, result)
        open_calls.pop()
        return result

    def marking(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def marked_function(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            if is_vectorized() or not _holds((args, kwargs), torch.Tensor):
                return function(*args, **kwargs)
            arguments = {
                name: value if _holds(value, (torch.Tensor, torch.SymInt, int, float)) else None
                for name, value in bound(function, args, kwargs).items()
            }
            open_calls.append(count)
            count += 1
            try:
                mark(False, arguments, function)
                result = function(*args, **kwargs)
                mark(True, result, function)
            finally:
                open_calls.pop()
            return result

        return marked_function

    functions = helpers(reference)
    try:
        for each in functions:
            each.names[each.name] = marking(each.function)
        for module in reference.modules():
            # The reference's own hooks run inside of ours.
            hooks += [
                module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True),
                module.register_forward_hook(leave, with_kwargs=True),
            ]
        yield marks
    finally:
        for each in functions:
            each.names[each.name] = each.function
        for hook in hooks:
            hook.remove()


def read(mark: Marked, node: Node, replace: Callable[[Any], Any]) -> Any:
    """Return the tree of a mark with the values of the graph in its slots."""
    tensors, sizes = node.args[2:4]
    assert isinstance(tensors, (list, tuple))
    assert isinstance(sizes, (list, tuple))
    return with_leaves(
        mark.tree,
        lambda leaf: (
            replace((sizes if leaf.is_size else tensors)[leaf.index])
            if isinstance(leaf, MarkSlot)
            else leaf
        ),
    )
