"""Fold what a person would not write: a pair of transposes, an index of all, a sum with nothing."""

import ast
from typing import Any


def _method(node: ast.expr, name: str) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == name
        and not node.keywords
    )


def _axes(node: ast.Call) -> Any:
    try:
        return sorted(ast.literal_eval(argument) for argument in node.args)
    except (ValueError, TypeError):
        return None


def _moved(node: ast.expr) -> tuple[Any, ...] | None:
    """Return the two axes of a `jnp.moveaxis(x, a, b)`."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "jnp.moveaxis":
        return tuple(ast.literal_eval(each) for each in node.args[1:])
    return None


class _Tidy(ast.NodeTransformer):
    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        if _method(node, "swapaxes"):
            assert isinstance(node.func, ast.Attribute)
            inner = node.func.value
            if _method(inner, "swapaxes"):
                assert isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute)
                if _axes(inner) is not None and _axes(inner) == _axes(node):
                    return inner.func.value
        if (axes := _moved(node)) is not None:
            inner = node.args[0]
            if _moved(inner) == axes[::-1]:
                assert isinstance(inner, ast.Call)
                return inner.args[0]
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        left, right = node.left, node.right
        if isinstance(node.op, ast.Add) and _is(right, 0):
            return left
        if isinstance(node.op, (ast.Mult, ast.Div)) and _is(right, 1.0):
            return left
        if isinstance(node.op, ast.BitAnd):
            if ast.unparse(left) == _TRUE:
                return right
            if ast.unparse(right) == _TRUE:
                return left
        return node


_TRUE = "jnp.ones((), dtype=jnp.bool)"


def _is(node: ast.expr, value: float) -> bool:
    return (
        isinstance(node, ast.Constant) and node.value == value and not isinstance(node.value, bool)
    )


def tidied(statement: ast.stmt) -> ast.stmt:
    """Return a statement with what cancels folded away."""
    return _Tidy().visit(statement)
