"""Write and read Python expressions of the file as syntax trees."""

import ast
import math
from collections.abc import Mapping
from typing import Any

import torch

Written = ast.expr

# JAX holds what torch holds in 64 bits in 32, unless x64 is on: the file that is written says so.
DTYPES = {
    torch.bool: "bool",
    torch.uint8: "uint8",
    torch.int8: "int8",
    torch.int16: "int16",
    torch.int32: "int32",
    torch.int64: "int32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float32",
    torch.complex64: "complex64",
    torch.complex128: "complex64",
}

# What models fill masks with has a name.
LIMITS = {
    getattr(torch.finfo(dtype), side): f"jnp.finfo(jnp.{DTYPES[dtype]}).{side}"
    for dtype in (torch.float16, torch.bfloat16, torch.float32)
    for side in ("min", "max")
}


def parsed(text: str) -> Written:
    """Parse one Python expression."""
    return ast.parse(text.strip(), mode="eval").body


def name_of(text: str) -> Written:
    """Write a variable that is read."""
    return ast.Name(text, ast.Load())


def names_in(tree: ast.AST) -> set[str]:
    """Return the names that a piece of source reads or assigns."""
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def stored(statement: ast.AST) -> set[str]:
    """Return the names that a statement assigns."""
    return {
        node.id
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }


def literal(value: Any) -> Written:
    """Write a constant of a graph: a number, a string, None, a dtype, or a sequence of these."""
    if isinstance(value, torch.dtype):
        return parsed(f"jnp.{DTYPES[value]}")
    if isinstance(value, (list, tuple)):
        return ast.Tuple([literal(each) for each in value], ast.Load())
    if isinstance(value, dict):
        return ast.Dict([literal(key) for key in value], [literal(each) for each in value.values()])
    if isinstance(value, float) and not math.isfinite(value):
        return parsed("jnp.nan" if math.isnan(value) else "jnp.inf" if value > 0 else "-jnp.inf")
    if isinstance(value, float) and value in LIMITS:
        return parsed(LIMITS[value])
    if isinstance(value, complex):
        return parsed(f"complex({value.real!r}, {value.imag!r})")
    if value is None or isinstance(value, (bool, int, float, str)):
        # A negative number is an operator and a number, so that precedence is right.
        return parsed(repr(value))
    raise TypeError(f"cannot write {type(value).__name__} {value!r} as a constant")


class _Filled(ast.NodeTransformer):
    """Put operands in the places of names, and fold what that makes constant."""

    def __init__(self, operands: Mapping[str, Written]) -> None:
        self.operands = operands

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self.operands.get(node.id, node)

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        self.generic_visit(node)
        if isinstance(node.value, ast.Tuple):
            try:
                position = ast.literal_eval(node.slice)
            except ValueError:
                return node
            if isinstance(position, int):
                return node.value.elts[position]
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        arguments: list[ast.expr] = []
        for each in node.args:
            if isinstance(each, ast.Starred) and isinstance(each.value, ast.Tuple):
                arguments += each.value.elts
            else:
                arguments.append(each)
        node.args = arguments
        return node


def filled(template: str, operands: Mapping[str, Written]) -> Written:
    """Write a template with each name that is an operand's replaced by that operand.

    `f(*sizes)` becomes `f(B, 4)`, and `sizes[1]` becomes `4`, where `sizes` is a sequence.
    """
    return with_operands(parsed(template), operands)


def with_operands(tree: Written, operands: Mapping[str, Written]) -> Written:
    """Replace names in an expression as `filled` does."""
    return _Filled(operands).visit(tree)
