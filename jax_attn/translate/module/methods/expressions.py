"""Write what computes each value of a call, as expressions in the names of its method."""

import ast
from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.fx import Node

from jax_attn.translate.module.methods.axes import Axes
from jax_attn.translate.module.methods.leaves import leaf
from jax_attn.translate.module.methods.scope import MethodContext, MethodScope
from jax_attn.translate.rules.expression import (
    Written,
    filled,
    literal,
    name_of,
    parsed,
    with_operands,
)
from jax_attn.translate.rules.operators.random import RATES
from jax_attn.translate.rules.rule import bound, described, expressions
from jax_attn.translate.rules.table import RULES
from jax_attn.translate.tracing.calls import ModuleCall
from jax_attn.translate.tracing.private import is_unbacked
from jax_attn.translate.tracing.problems import Unsupported, problem_at
from jax_attn.translate.tracing.source.source_lines import passed_name
from jax_attn.translate.tracing.unsupported import problems_of, unknown_size
from jax_attn.translate.tracing.values import is_size, resolved, tensors_of

RAISING = ("operator", "random", "data-dependent size", "size")
"""The kinds of problems that stand at one place of a method, where a partial translation raises."""


def _raising(problem: Unsupported, arguments: Mapping[str, Written]) -> Written:
    """Write a call that raises NotImplementedError with what has no translation, and its line."""
    line = f"{Path(problem.file).name}:{problem.line}: {problem.text}"
    place = literal(line if problem.file else problem.reason)
    given = [ast.keyword(name, each) for name, each in arguments.items()]
    return ast.Call(name_of("not_translated"), [literal(problem.operator), place], given)


def element(node: Node) -> tuple[Node, int]:
    """Return what a `getitem` reads, and the index."""
    source, index = node.args
    assert isinstance(source, Node)
    assert isinstance(index, int)
    return source, index


class Expressions(MethodScope):
    """Write the expressions of one call. `method` writes its statements."""

    def __init__(self, call: ModuleCall, tree: MethodContext) -> None:
        super().__init__(call, tree)
        self.place = 0
        self.axes = Axes(call, tree.sizes, tree.axis_names(call))

    @abstractmethod
    def assign(self, values: Sequence[Node], made: Written, place: int) -> None:
        """Give values a statement of their own."""

    def written(self, value: Any) -> Written:
        """Write an operand: a tensor, a size, a constant, or a sequence of these."""
        if isinstance(value, Node):
            if is_size(value):
                return self.size(value.meta["val"])
            value = resolved(value)
            if value in self.names:
                return name_of(self.names[value])
            if value in self.tree.state:
                return self._state(value)
            return self.expression(value)
        if isinstance(value, (torch.SymInt, torch.SymFloat)):
            return self.size(value)
        if isinstance(value, (list, tuple)):
            return ast.Tuple([self.written(each) for each in value], ast.Load())
        if isinstance(value, (torch.device, torch.layout, torch.memory_format)):
            return literal(None)
        return literal(value)

    def _state(self, node: Node) -> Written:
        name = self.call.state[node]
        if node in self.call.given.values():
            return name_of(next(k for k, v in self.call.given.items() if v is node))
        return self.tree.tensor(self.call.path, name)

    def size(self, value: Any) -> Written:
        """Write a size: a number, or an expression in the names of sizes that vary."""
        if isinstance(value, int):
            return literal(value)
        written = self.axes.written(value)
        return written if written is not None else self._size_of_a_value(value)

    def _size_of_a_value(self, value: Any) -> Written:
        text = self.tree.sizes.written(value)
        for name, node in self.held.items():
            shape = node.meta["val"].shape if isinstance(node.meta["val"], torch.Tensor) else ()
            for axis, size in enumerate(shape):
                if isinstance(size, torch.SymInt) and self.tree.sizes.written(size) == text:
                    return parsed(f"{name}.shape[{axis}]")
        reason = f"this size is not that of any tensor in `{self.call.path}`"
        problem = Unsupported("size", text, reason)
        if not is_unbacked(value):  # else the operator that makes it is told
            self.tree.problems.append(problem)
        return _raising(problem, {})

    def expression(self, value: Node) -> Written:
        """Write what computes a value, out of the values that it reads."""
        item = self.produced[value]
        if isinstance(item, ModuleCall):
            called = self.called(item)
            outputs = self.tree.outputs(item)
            if len(outputs) == 1:
                return called
            return ast.Subscript(called, literal(outputs.index(value)), ast.Load())
        if "getitem" in str(item.target) and "built-in" in str(item.target):
            source, index = element(item)
            made = self._operator(resolved(source)) if source not in self.names else None
            if isinstance(made, tuple):
                return made[index]
            whole = made if made is not None else name_of(self.names[source])
            return ast.Subscript(whole, literal(index), ast.Load())
        made = self._operator(item)
        if isinstance(made, tuple):
            return ast.Tuple(list(made), ast.Load())
        return made

    def _operator(self, node: Node) -> Written | tuple[Written, ...]:
        problems = problems_of(node, is_training=self.tree.is_training)
        if (problem := next(problems, None) or unknown_size(node)) is not None:
            return self._missing(node, problem)
        target = node.target
        assert isinstance(target, torch._ops.OpOverload)
        arguments = bound(target, node.args, node.kwargs)
        values = torch.fx.node.map_arg(arguments, lambda each: each.meta["val"])
        # A tensor is a mark at first, to see how often the rule reads it.
        tensors = {
            f"operand_{name}": resolved(value)
            for name, value in arguments.items()
            if isinstance(value, Node) and not is_size(value)
        }
        made = {
            name: name_of(f"operand_{name}")
            if f"operand_{name}" in tensors
            else self.written(value)
            for name, value in arguments.items()
        }
        if rate := arguments.get(RATES.get(str(target), "")):
            made["dropout"] = parsed(f"self.{self.tree.dropout(self.call.path, rate)}")
        if self.tree.is_training:
            made["rngs"] = parsed("self.rngs")
        seen = {name: described(value) for name, value in values.items()}
        try:
            result = expressions(RULES[str(target)], seen, made, described(node.meta["val"]))
        except NotImplementedError as refusal:
            problem = problem_at(node, "operator", str(target), str(refusal))
            self.tree.problems.append(problem)
            return self._missing(node, problem)
        trees = result if isinstance(result, tuple) else (result,)
        read = Counter(
            each.id for tree in trees for each in ast.walk(tree) if isinstance(each, ast.Name)
        )
        operands: dict[str, Written] = {}
        for name, value in tensors.items():
            if read[name] > 1 and value in self.produced and value not in self.names:
                # It stands before the statement at hand, which may read what its name held.
                self.assign([value], self.expression(value), self.place - 1)
            if read[name]:
                operands[name] = self.written(value)
        whole = tuple(with_operands(tree, operands) for tree in trees)
        return whole if isinstance(result, tuple) else whole[0]

    def _missing(self, node: Node, problem: Unsupported) -> Written:
        """Write a call that raises, with the arguments of an operator that has no translation."""
        if isinstance(node.target, torch._ops.OpOverload):
            default = bound(node.target, (), {})
            given = bound(node.target, node.args, node.kwargs)
            arguments = {k: v for k, v in given.items() if k not in default or v != default[k]}
        else:  # functions are among its arguments
            arguments = {each.name: each for each in tensors_of(node.args)}
        return _raising(problem, {name: self.written(each) for name, each in arguments.items()})

    def called(self, item: ModuleCall) -> Written:
        """Write a call of a module, or of a function."""
        if item.function is not None:
            name, parameters = self.tree.functions(item)
            given = [
                self.written(item.given[each] if each in item.given else item.arguments[each])
                for each in parameters
            ]
            return ast.Call(name_of(name), given, [])
        return self.call_of(item, parsed(self.tree.attribute(self.call.path, item.path)))

    def call_of(
        self, item: ModuleCall, module: Written, names: Mapping[str, str] | None = None
    ) -> Written:
        """Write a call of a module.

        Args:
          item: the call.
          module: the expression of the module.
          names: variables that stand for arguments.
        """
        given = {name: name_of(variable) for name, variable in (names or {}).items()}
        for name, value in item.given.items():
            if name not in given:
                given[name] = self.written(value)
        found = leaf(item.module)
        if found is not None:
            (_, x), *_ = item.given.items()
            called = found.called(item.module, x.meta["val"].ndim)
            return filled(called, {"module": module, "x": next(iter(given.values()))})
        given |= {name: literal(value) for name, value in self.tree.choices(item).items()}
        positional: list[Written] = []
        keywords: list[ast.keyword] = []
        skipped = False
        for name in self.tree.signatures(item):
            made = given[name] if name in given else self._absent(item, name)
            if made is None:
                skipped = True
            elif skipped:
                keywords.append(ast.keyword(name, made))
            else:
                positional.append(made)
        return ast.Call(module, positional, keywords)

    def _absent(self, item: ModuleCall, name: str) -> Written | None:
        """Return the argument of this method, None in this call, that torch passes on as `name`."""
        frame = self._frame(item)
        if item.arguments.get(name) is not None or frame is None:
            return None
        own = passed_name(frame, type(item.module).forward, name) or ""
        is_none = own not in self.call.given and self.call.arguments.get(own) is None
        if own in self.tree.signatures(self.call) and is_none and own not in self.assigned:
            return name_of(own)
        return None
