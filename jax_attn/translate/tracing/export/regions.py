"""Write regions under `no_grad` and under autocast into the graph that surrounds them.

Making a graph functional loses `no_grad`: what such a region computes is detached where it leaves
the region. What needs no gradient anyway, such as a mask, is left alone.
"""

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule, Node

from jax_attn.translate.tracing.export.marks import MARK
from jax_attn.translate.tracing.private import AUTOCAST, SET_GRAD
from jax_attn.translate.tracing.problems import Unsupported, problem_at

_DETACH = torch.ops.aten.detach.default


class _Gradients:
    """Follow what gradients flow through, in a graph whose operators may write in place."""

    def __init__(self) -> None:
        # A view and what it is a view of are one value, by the node of the latter.
        self.base: dict[Node, Node] = {}
        self.differentiable: set[Node] = set()
        self.quiet: set[Node] = set()

    def follow(self, node: Node, is_quiet: bool = False) -> None:
        """Take the next operator of the graph into account."""
        first = node.args[0] if node.args else None
        is_alias = node.target is operator.getitem or _aliases(node)
        self.base[node] = (
            self.base[first]
            if is_alias and isinstance(first, Node) and node.target is not _DETACH
            else node
        )
        if is_quiet:
            self.quiet.add(node)
        if node.target not in (_DETACH, MARK) and any(map(self.flow, node.all_input_nodes)):
            self.differentiable.add(self.base[node])

    def flow(self, node: Node) -> bool:
        """Return whether a value depends on a parameter or on an input that has a gradient."""
        return self.base[node] in self.differentiable


class _Inliner:
    """Write regions into a graph."""

    def __init__(self, program: ExportedProgram) -> None:
        self.program = program
        self.graph = program.graph
        self.gradients = _Gradients()
        self.detached: dict[Node, Node] = {}
        self.problems: list[Unsupported] = []

    def run(self) -> None:
        specs = {spec.arg.name: spec for spec in self.program.graph_signature.input_specs}
        for node in list(self.graph.nodes):
            if node.op == "placeholder":
                self.gradients.follow(node)
                kind = specs[node.name].kind
                if kind in (InputKind.PARAMETER, InputKind.USER_INPUT) and _is_real(node):
                    self.gradients.differentiable.add(node)
            elif node.target in (SET_GRAD, AUTOCAST):
                self._replace(node)
            elif node.op == "call_function":
                _detach_anew(node)
                self.gradients.follow(node)

    def _replace(self, node: Node) -> None:
        with self.graph.inserting_before(node):
            results = self._region(node, self.program.graph_module, {}, True)
        for user in list(node.users):
            result = results[user.args[1]]  # type: ignore[index]
            user.replace_all_uses_with(result)
            self.program.graph_signature.replace_all_uses(user.name, result.name)
            self.graph.erase_node(user)
        self.graph.erase_node(node)

    def _region(
        self, node: Node, owner: GraphModule, outside: Mapping[Node, Any], has_grad: bool
    ) -> list[Any]:
        """Copy the body of a region to the open position; return what leaves it."""
        if node.target is SET_GRAD:
            inner_grad, body, *operands = node.args
        else:
            device, dtype, enabled, _, body, *operands = node.args
            inner_grad = has_grad
        module = owner.get_submodule(str(body.target))  # type: ignore[union-attr]
        assert isinstance(module, GraphModule)
        if node.target is AUTOCAST and enabled and device == _device(node):
            # What narrows under autocast is chosen operator by operator, inside torch.
            steps = (step for step in module.graph.nodes if step.op == "call_function")
            reason = f"a region computes in {dtype} under autocast, which is not written as casts"
            self.problems.append(
                problem_at(next(steps, node), "autocast", "torch.autocast", reason)
            )
        inside = dict(
            zip(
                (step for step in module.graph.nodes if step.op == "placeholder"),
                (outside.get(each, each) if isinstance(each, Node) else each for each in operands),
                strict=True,
            )
        )
        results: list[Any] = []
        for step in module.graph.nodes:
            if step.op == "output":
                results = torch.fx.node.map_arg(list(step.args[0]), lambda each: inside[each])
            elif step.target in (SET_GRAD, AUTOCAST):
                inside[step] = self._region(step, module, inside, bool(inner_grad))
            elif step.op == "call_function":
                inside[step] = self._step(step, inside, bool(inner_grad))
        return [self._seen(each) for each in results] if has_grad else results

    def _step(self, step: Node, inside: Mapping[Node, Any], has_grad: bool) -> Any:
        if step.target is operator.getitem and isinstance(inside[step.args[0]], list):  # type: ignore[index]
            return inside[step.args[0]][step.args[1]]  # type: ignore[index]
        args, kwargs = torch.fx.node.map_arg(
            (step.args, step.kwargs),
            lambda each: self._seen(inside[each]) if has_grad else inside[each],
        )
        made = self.graph.create_node("call_function", step.target, args, kwargs)
        made.meta = dict(step.meta)
        _detach_anew(made)
        self.gradients.follow(made, is_quiet=not has_grad)
        return made

    def _seen(self, value: Any) -> Any:
        """Return a value as it is seen where gradients flow."""
        if (
            not isinstance(value, Node)
            or value not in self.gradients.quiet
            or not self.gradients.flow(value)
            or not _is_real(value)
        ):
            return value
        if value not in self.detached:
            detached = self.graph.call_function(_DETACH, (value,))
            detached.meta = dict(value.meta)
            self.gradients.follow(detached)
            self.detached[value] = detached
        return self.detached[value]


def _detach_anew(node: Node) -> None:
    """Detach out of place: a functional graph forgets `detach_`, and who reads it comes after."""
    if node.target is torch.ops.aten.detach_.default:
        node.target = _DETACH


def _is_real(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def _device(node: Node) -> str:
    values = (source.meta.get("val") for source in node.all_input_nodes)
    return next((each.device.type for each in values if isinstance(each, torch.Tensor)), "cpu")


def _aliases(node: Node) -> bool:
    """Return whether what an operator returns shares memory with its first argument."""
    schema = getattr(node.target, "_schema", None)
    return bool(
        schema is not None
        and schema.returns
        and schema.returns[0].alias_info
        and schema.arguments
        and schema.arguments[0].alias_info
    )


def _hidden_writes(graph: torch.fx.Graph, gradients: _Gradients) -> list[Unsupported]:
    """Find writes past autograd, by `.data`, `detach()` or `no_grad`, that are read later.

    There a value changes and its gradient flows on as if it had not: no functional graph says so.
    """
    order = {node: place for place, node in enumerate(graph.nodes)}
    problems = []
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if node.op != "call_function" or schema is None or not schema.is_mutable:
            continue
        written = gradients.base[node] if _aliases(node) else None
        if written is None:
            continue
        hidden = []
        if node in gradients.quiet and written not in gradients.quiet:
            hidden.append(written)
        while written.target is _DETACH:
            written = gradients.base[written.args[0]]  # type: ignore[index]
            hidden.append(written)
        if any(
            each in gradients.differentiable
            and each not in gradients.quiet
            and _is_read(each, gradients, order, node)
            for each in hidden
        ):
            reason = "writes into a tensor past autograd, whose gradient does not see it"
            problems.append(problem_at(node, "alias", str(node.target), reason))
    return problems


def _is_read(base: Node, gradients: _Gradients, order: dict[Node, int], after: Node) -> bool:
    """Return whether a value, or a view of it, is read after an operator."""
    return any(
        order[user] > order[after] and user.target is not MARK
        for view, whole in gradients.base.items()
        if whole is base and view in order
        for user in view.users
    )


def inline_regions(program: ExportedProgram) -> list[Unsupported]:
    """Write every region into the program's graph, in place; return what cannot be translated."""
    inliner = _Inliner(program)
    inliner.run()
    problems = inliner.problems + _hidden_writes(program.graph, inliner.gradients)
    program.graph.eliminate_dead_code()
    program.graph_module.recompile()
    return problems
