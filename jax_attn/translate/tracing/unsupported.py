"""List everything in a traced module that cannot be translated, each with its line."""

from collections.abc import Container, Iterator

import torch
from torch.export.graph_signature import OutputKind
from torch.fx import Node

from jax_attn.translate.rules.rule import bound
from jax_attn.translate.rules.table import RULES
from jax_attn.translate.tracing.private import is_unbacked, unbacked
from jax_attn.translate.tracing.problems import Unsupported, problem_at
from jax_attn.translate.tracing.traced import TracedModule
from jax_attn.translate.tracing.values import does_nothing, is_size


def unsupported(traced: TracedModule, rules: Container[str] = RULES) -> list[Unsupported]:
    """Return all that cannot be translated, in the order of the graph, each place once.

    Args:
      traced: the module.
      rules: the operators that have a rule, by name and overload.
    """
    problems = [*traced.problems]
    for node in traced.program.graph.nodes:
        if node.op == "call_function":
            problems += problems_of(node, rules, is_training=traced.is_training)
    problems += _buffers(traced)
    problems += _wide_integers(traced)
    return list(dict.fromkeys(problems))


def problems_of(
    node: Node, rules: Container[str] = RULES, *, is_training: bool = False
) -> Iterator[Unsupported]:
    """Yield what keeps one operator from being translated.

    is_training: whether it may draw random numbers.
    """
    name = str(node.target)
    if unbacked(node):
        reason = "the size of its result depends on the values of a tensor"
        if not isinstance(node.meta.get("val"), torch.Tensor):
            reason = "Python reads the value of a tensor"
        yield problem_at(node, "data-dependent size", name, reason)
    elif not is_training and _is_random(node):
        yield problem_at(node, "random", name, "draws random numbers, in eval mode too")
    elif isinstance(node.target, torch._ops.OpOverload):
        if name not in rules and not is_size(node) and not does_nothing(node):
            yield problem_at(node, "operator", name, "no rule for this operator")
    elif isinstance(node.target, torch._ops.HigherOrderOperator):
        yield problem_at(node, "operator", name, "no rule for an operator that runs functions")


def unknown_size(node: Node) -> Unsupported | None:
    """Return what keeps an operator from being translated if it reads what depends on values."""
    values = (each.meta.get("val") for each in (node, *node.all_input_nodes))
    if not any(map(is_unbacked, values)):
        return None
    reason = "a size of what it reads depends on the values of a tensor"
    return problem_at(node, "data-dependent size", str(node.target), reason)


def _is_random(node: Node) -> bool:
    """Return whether an operator draws random numbers with these arguments."""
    operator = node.target
    if (
        not isinstance(operator, torch._ops.OpOverload)
        or torch.Tag.nondeterministic_seeded not in operator.tags
    ):
        return False
    arguments = bound(operator, node.args, node.kwargs)
    for name in ("train", "training"):
        if name in arguments and not arguments[name]:
            return False
    return all(arguments.get(name, 1.0) != 0.0 for name in ("dropout_p", "dropout", "p"))


def _wide_integers(traced: TracedModule) -> Iterator[Unsupported]:
    """Yield the tensors whose integers JAX, which holds them in 32 bits, would cut off."""
    state = traced.root.module.state_dict(keep_vars=True)
    tensors = {**state, **dict(traced.root.module.named_buffers()), **traced.constants}
    limits = torch.iinfo(torch.int32)
    for name in dict.fromkeys(traced.state.values()):
        value = tensors.get(name)
        if value is None or value.dtype != torch.int64 or not value.numel():
            continue
        if value.min() < limits.min or value.max() > limits.max:
            yield Unsupported("buffer", name, "it holds integers of more than 32 bits")


def _buffers(traced: TracedModule) -> Iterator[Unsupported]:
    nodes = {node.name: node for node in traced.program.graph.nodes}
    is_eval = not traced.is_training
    for spec in traced.program.graph_signature.output_specs:
        if spec.kind == OutputKind.BUFFER_MUTATION:
            reason = "forward writes into this buffer" + ", in eval mode too" * is_eval
            yield problem_at(nodes[spec.arg.name], "buffer", str(spec.target), reason)
