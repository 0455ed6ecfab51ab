"""Arrange a traced reference: its calls, its tensors, and its sizes."""

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node

from jax_attn.translate.tracing.calls import (
    ModuleCall,
    call_tree,
    connect,
    drop_erased,
    erase_marks,
    is_below,
    leaves_of,
    nodes_of,
)
from jax_attn.translate.tracing.export.exported import Exported
from jax_attn.translate.tracing.export.sizes import NamedSizes
from jax_attn.translate.tracing.problems import TranslationError, Unsupported
from jax_attn.translate.tracing.values import is_size, operands, tensors_of


@dataclass(frozen=True)
class TracedModule:
    """Hold a program as a tree of calls.

    Attributes:
      root: the call of the reference.
      state: every parameter, buffer and constant of the graph: its node and its first name.
      constants: those of `state` that are neither parameters nor buffers of the reference.
      returned: what the reference returned, a tree whose leaves are nodes or constants.
      program: the graph.
      sizes: the sizes that vary.
      problems: what torch.export let pass and cannot be translated.
      is_training: whether the reference was in training mode.
    """

    root: ModuleCall
    state: Mapping[Node, str]
    constants: Mapping[str, torch.Tensor]
    returned: Any
    program: ExportedProgram
    sizes: NamedSizes
    problems: tuple[Unsupported, ...]
    is_training: bool


def traced(
    export: Exported, reference: torch.nn.Module, working: Container[str] = ()
) -> TracedModule:
    """Arrange the graph of an export as a tree of calls.

    working: as for `call_tree`.

    Raises:
      TranslationError: the export fixed a size that is named, or made two of them one.
    """
    program = export.program
    _without_assertions(program)
    prefix = "training_" if export.is_training else ""
    state, constants = _state(program, reference, prefix)
    root = call_tree(export, reference, working)
    erase_marks(program)
    drop_erased(root)
    state = {node: [_one_name(root, node, names)] for node, names in state.items()}
    connect(root, state, set(constants), set(_outputs(program)))
    root.results = [node for node in dict.fromkeys(leaves_of(root.returned)) if not is_size(node)]
    inputs = dict(nodes_of(root.arguments))
    sizes = NamedSizes(program, inputs, export.dynamic)
    if sizes.fixed:
        raise TranslationError(sizes.fixed)
    return TracedModule(
        root,
        {node: names[0] for node, names in state.items()},
        constants,
        root.returned,
        program,
        sizes,
        export.problems,
        export.is_training,
    )


def _without_assertions(program: ExportedProgram) -> None:
    for node in reversed(program.graph.nodes):
        if node.op == "call_function" and "_assert" in str(node.target) and not node.users:
            program.graph.erase_node(node)


def _outputs(program: ExportedProgram) -> list[Node]:
    """Return the values that the program returns, and those that it writes into buffers."""
    return tensors_of(program.graph.output_node().args)


def _named_tensors(reference: torch.nn.Module) -> dict[int, list[str]]:
    """Return the names of each parameter and buffer, each by the first name of its module."""
    names: dict[int, list[str]] = {}
    for path, module in reference.named_modules():
        for name, tensor in {**module._parameters, **module._buffers}.items():
            if tensor is not None:
                names.setdefault(id(tensor), []).append(f"{path}.{name}".lstrip("."))
    return names


def _state(
    program: ExportedProgram, reference: torch.nn.Module, prefix: str
) -> tuple[dict[Node, list[str]], dict[str, torch.Tensor]]:
    """Return all names of the tensors of the graph, and the values of the constants.

    prefix: what the names of constants begin with, since those of two graphs may be alike.
    """
    modules = dict(reference.named_modules(remove_duplicate=False))
    names = _named_tensors(reference)
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    state: dict[Node, list[str]] = {}
    constants: dict[str, torch.Tensor] = {}
    for spec in program.graph_signature.input_specs:
        if spec.kind == InputKind.USER_INPUT or spec.target is None:
            continue
        path, _, name = spec.target.rpartition(".")
        tensors = {**modules[path]._parameters, **modules[path]._buffers} if path in modules else {}
        if tensors.get(name) is not None:
            state[nodes[spec.arg.name]] = names[id(tensors[name])]
        else:
            known = f"{prefix}{spec.target}"
            state[nodes[spec.arg.name]] = [known]
            constant = program.constants.get(spec.target)
            if isinstance(constant, torch.Tensor):
                constants[known] = constant
    return state, constants


def _one_name(root: ModuleCall, node: Node, names: list[str]) -> str:
    """Choose among the names of a tied tensor: the one by which it is read, if that is one."""
    if len(names) == 1:
        return names[0]
    read_by: set[str] = set()

    def walk(call: ModuleCall, path: str) -> None:
        for step in call.steps:
            if isinstance(step, ModuleCall):
                walk(step, path if step.function is not None else step.path)
            elif node in operands(step):
                own = [name for name in names if path and is_below(name, path)]
                read_by.add((own or names)[0])

    walk(root, "")
    return read_by.pop() if len(read_by) == 1 else names[0]
