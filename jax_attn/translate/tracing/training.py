"""Write dropout as one operator, in the graphs of training mode and of eval mode."""

import operator
from collections.abc import Container, Iterator

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind
from torch.fx import Node

from jax_attn.translate.tracing.calls import ModuleCall, is_below, steps
from jax_attn.translate.tracing.export.marks import LIBRARY, MARK

LIBRARY.define("dropout(Tensor input, float p) -> Tensor")
DROPOUT = torch.ops.jax_attn.dropout.default
"""Dropout in training mode, and in eval mode what training turns on. It is never run."""


def name_dropouts(program: ExportedProgram) -> None:
    """Make each dropout of a graph in training mode a `DROPOUT`, unless its mask is read."""
    graph = program.graph
    for node in list(graph.nodes):
        if node.target is not torch.ops.aten.native_dropout.default or node.args[2] is False:
            continue
        results = list(node.users)
        if any(each.target is not operator.getitem or each.args[1] != 0 for each in results):
            continue
        for result in results:
            result.target, result.args = DROPOUT, node.args[:2]
        graph.erase_node(node)


def share_dropouts(evaluated: ExportedProgram, trained: ExportedProgram) -> None:
    """Write the dropouts of training mode in the graph of eval mode, where they leave a copy."""
    dropped = _sites(trained, DROPOUT)
    for site, copies in _sites(evaluated, torch.ops.aten.clone.default).items():
        rates = [node.args[1] for node in dropped.get(site, ())]
        if len(rates) == len(copies):
            for node, rate in zip(copies, rates, strict=True):
                node.target, node.args, node.kwargs = DROPOUT, (node.args[0], rate), {}


def _sites(
    program: ExportedProgram, target: torch._ops.OpOverload
) -> dict[tuple[str, str], list[Node]]:
    """Return the calls of an operator, by their module and their lines in torch's source."""
    found: dict[tuple[str, str], list[Node]] = {}
    for node in program.graph.nodes:
        if node.target is target:
            path = [value[0] for value in node.meta.get("nn_module_stack", {}).values()][-1:]
            found.setdefault(("".join(path), node.meta.get("stack_trace") or ""), []).append(node)
    return found


def leave_to_layers(program: ExportedProgram, buffers: Container[str]) -> None:
    """Leave out what a program writes into buffers that layers of the file keep by themselves."""
    output = program.graph.output_node()
    specs = program.graph_signature.output_specs
    (values,) = output.args
    assert isinstance(values, (list, tuple))
    kept = [
        (spec, value)
        for spec, value in zip(specs, values, strict=True)
        if spec.kind != OutputKind.BUFFER_MUTATION or spec.target not in buffers
    ]
    specs[:] = [spec for spec, _ in kept]
    output.args = (tuple(value for _, value in kept),)
    program.graph.eliminate_dead_code()


def called_elsewhere(program: ExportedProgram) -> set[str]:
    """Return the paths of modules that a module calls which does not contain them."""
    found: set[str] = set()
    for node in program.graph.nodes:
        paths = [value[0] for value in node.meta.get("nn_module_stack", {}).values()][-2:]
        if node.target is MARK and len(paths) == 2 and not is_below(paths[1], paths[0]):
            found.add(paths[1])
    return found


def working(call: ModuleCall) -> Iterator[str]:
    """Iterate over the paths of the modules in whose calls something runs."""
    if next(call.nodes(), None) is not None:
        yield call.path
    for step in call.steps:
        if isinstance(step, ModuleCall):
            yield from working(step)


def changing(evaluated: ModuleCall, trained: ModuleCall) -> frozenset[str]:
    """Return the modules whose own code does other things in training mode, by path."""
    found_in: tuple[dict[str, list[str]], ...] = ({}, {})

    def walk(call: ModuleCall, found: dict[str, list[str]]) -> None:
        own = found.setdefault(call.path, [])
        for step in steps(call):
            own.append(step.path if isinstance(step, ModuleCall) else str(step.target))
            if isinstance(step, ModuleCall):
                walk(step, found)

    walk(evaluated, found_in[0])
    walk(trained, found_in[1])
    return frozenset(path for path, own in found_in[1].items() if own != found_in[0].get(path))
