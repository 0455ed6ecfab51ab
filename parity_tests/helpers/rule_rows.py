"""Rows of the tests of rules: an operator, its arguments, and a dict of those by keyword."""

import ast
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import tensor

from helpers import operators
from jax_attn.translate.rules.expression import literal, parsed
from jax_attn.translate.rules.rule import Array, VaryingSize, expressions
from jax_attn.translate.rules.table import RULES

INF, NAN = float("inf"), float("nan")
# Zeros, ones, ties, negatives, the kinks of activations, and what is not finite.
X = tensor([[-3.0, -1.0, -0.5, 0.0, 0.5], [1.0, 2.0, 3.0, -0.0, NAN], [1.0, 1.0, 6.0, INF, 20.0]])
KINKS = tensor([-6.0, -3.0, -1.0, -0.5, 0.0, 0.5, 1.0, 3.0, 6.0, 25.0])
F = tensor([[1.0, 2.0, -3.0], [0.0, 2.0, 0.0]])
G = tensor([[1.0, -2.0, 0.7], [2.0, 2.0, 1.5]])
INTS = tensor([[-7, 3, 0], [2, -2, 7]])
DIVISORS = tensor([[2, -2, 3], [-3, 5, 7]])
BOOLS = tensor([[True, False, True], [False, False, True]])
HALF = F.half()
SCALAR = tensor(2.0)
BTD = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(1))
SQUARE = tensor([[2.0, 0.3, -0.5], [0.1, 1.5, 0.7], [-0.2, 0.4, 3.0]])


def call(row: Sequence[Any]) -> tuple[str, Sequence[Any], dict[str, Any]]:
    name, *args = row
    kwargs = args.pop() if args and isinstance(args[-1], dict) else {}
    return f"aten.{name}", args, kwargs


def named(rows: Sequence[Sequence[Any]], *marks: pytest.MarkDecorator) -> list[Any]:
    """Return the rows as parameters of a test, each with the name of its operator."""
    return [pytest.param(*call(row), id=row[0], marks=marks) for row in rows]


def paired(rows: Sequence[tuple[Sequence[Any], Any]]) -> list[Any]:
    """Return pairs of a row and something as parameters of a test, likewise."""
    return [pytest.param(row, other, id=row[0]) for row, other in rows]


def text(row: Sequence[Any]) -> str:
    """Return what the rule writes for a row, with tensors as x0, x1, ..."""
    name, args, kwargs = call(row)
    return operators.in_jax(name, *args, **kwargs)[2]


def written(name: str, shape: Any, arguments: Any, out: Any, names: dict[int, str]) -> str:
    """Return what a rule writes for a tensor `x` of a shape with sizes that vary, as named."""

    def array(shape: Any) -> Any:
        return (
            [array(each) for each in shape] if isinstance(shape, list) else Array(shape, "float32")
        )

    def operand(value: Any) -> ast.expr:
        if isinstance(value, VaryingSize):
            return parsed(names[value.hint])
        if isinstance(value, Array):
            return parsed("index")
        if isinstance(value, list):
            return ast.Tuple([operand(each) for each in value], ast.Load())
        return literal(value)

    given = {"self": array(shape), **arguments}
    operands = {key: operand(value) for key, value in arguments.items()}
    rule = RULES[f"aten.{name}"]
    tree = expressions(rule, given, {"self": parsed("x"), **operands}, array(out))
    assert isinstance(tree, ast.expr)
    return ast.unparse(tree)
