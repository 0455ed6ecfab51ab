"""Export a torch module as one functional graph, with the modules that ran its operators."""

import inspect
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from jax_attn.translate.tracing.export.alike import drawn
from jax_attn.translate.tracing.export.marks import Marks, bound, marked
from jax_attn.translate.tracing.export.refusals import (
    cache_problems,
    name_problems,
    refused,
    silence,
)
from jax_attn.translate.tracing.export.regions import inline_regions
from jax_attn.translate.tracing.export.sizes import Dynamic, shapes_of, size_problems
from jax_attn.translate.tracing.private import seeing_all, training_readers
from jax_attn.translate.tracing.problems import TranslationError, Unsupported
from jax_attn.translate.tracing.source.frames import is_reference, reference_frames


@dataclass(frozen=True)
class Exported:
    """Hold a module's functional graph.

    Attributes:
      program: the graph; it contains the marks of `marks`.
      marks: what each mark says.
      dynamic: the names of its sizes.
      problems: what torch.export let pass and cannot be translated.
      readers: the modules whose `training` the reference's source reads.
      is_training: whether the module was in training mode.
      seconds: how long torch took to trace and to make the graph functional.
    """

    program: ExportedProgram
    marks: Marks
    dynamic: Dynamic
    problems: tuple[Unsupported, ...]
    readers: frozenset[torch.nn.Module]
    is_training: bool
    seconds: float


@contextmanager
def unchanged(reference: torch.nn.Module) -> Iterator[None]:
    """Put a module's attributes back as they were, those of all modules below it too."""
    kept = [
        (module, dict(vars(module)), {name: dict(vars(module)[name]) for name in _TABLES})
        for module in reference.modules()
    ]
    try:
        yield
    finally:
        for module, attributes, tables in kept:
            # `vars` is the module's own dict, so that nothing of torch's setters runs.
            vars(module).clear()
            vars(module).update(attributes)
            for name, table in tables.items():
                attributes[name].clear()
                attributes[name].update(table)


_TABLES = ("_parameters", "_buffers", "_modules")


def exported(
    reference: torch.nn.Module,
    inputs: Mapping[str, Any] | tuple[Any, ...],
    dynamic: Dynamic | None = None,
    *,
    is_training: bool = False,
) -> Exported:
    """Export a module as one graph without in-place operators.

    Args:
      reference: the module; it is not changed.
      inputs: its inputs, positional or by name; tensors, or sequences or dicts of these.
      dynamic: the axes whose sizes vary, by input and axis, each with the name of its size. Two
        axes with one name have one size. A tensor in a sequence or a dict is named as in the file
        that is written: `<argument>_<index>`, `<argument>_<key>`.
      is_training: whether to export it in training mode, in place of eval mode.

    Raises:
      TranslationError: torch.export cannot trace the module, or an input or the name of a size is
        wrong.
    """
    args, kwargs = _apart((inputs, {}) if isinstance(inputs, tuple) else ((), dict(inputs)))
    dynamic = dynamic or {}
    try:
        arguments = bound(reference.forward, args, kwargs)
    except TypeError as error:
        raise TranslationError([Unsupported("input", "inputs", str(error))]) from error
    problems = cache_problems(arguments) + size_problems(arguments, dynamic)
    problems += name_problems(reference)
    if problems:
        raise TranslationError(problems)
    start = time.perf_counter()
    with unchanged(reference), torch.enable_grad(), silence():
        reference.train(is_training)
        options: dict[str, Any] = {
            "args": args,
            "kwargs": kwargs,
            "dynamic_shapes": _dynamic_shapes(reference, args, kwargs, dynamic),
            "strict": False,
        }
        before = drawn()
        with (
            refused(reference, options),
            training_readers(is_reference) as readers,
            marked(reference, readers) as marks,
            seeing_all(reference_frames),
        ):
            program = torch.export.export(reference, **options)
        hidden = inline_regions(program)
        if drawn() != before:
            reason = "Python itself draws random numbers, which a graph does not hold"
            hidden.append(Unsupported("module", "random", reason))
        with refused(reference, options):
            program = program.run_decompositions({})
        replace_copies(program)
    seconds = time.perf_counter() - start
    return Exported(
        program, marks, dynamic, tuple(hidden), frozenset(readers), is_training, seconds
    )


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


def _apart(arguments: Any) -> Any:
    """Copy what is given twice, so that each argument is a value of its own in the graph."""
    seen: set[int] = set()

    def own(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        is_new = id(leaf) not in seen
        seen.add(id(leaf))
        return leaf if is_new else leaf.clone()

    return torch.utils._pytree.tree_map(own, arguments)


def _dynamic_shapes(
    reference: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    dynamic: Dynamic,
) -> Any:
    """Return torch.export's `dynamic_shapes`, in the structure of the arguments."""
    if not dynamic:
        return None
    bound_arguments = inspect.signature(reference.forward).bind(*args, **kwargs).arguments
    parameters = inspect.signature(reference.forward).parameters
    shapes: dict[str, Any] = {}
    for name, value in bound_arguments.items():
        kind = parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            shapes[name] = shapes_of(value, dynamic)
        else:
            shapes[name] = shapes_of({name: value}, dynamic)[name]
    return shapes
