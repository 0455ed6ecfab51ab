"""Pairs of transposes in two statements: `q = x.swapaxes(1, 2)`, read as `q.swapaxes(1, 2)`."""

import ast
from collections.abc import Sequence

from jax_attn.translate.module.merging import stored


def without_swaps(statements: Sequence[ast.stmt]) -> list[ast.stmt]:
    """Leave out the transpose of a variable, if every statement that reads it swaps it back.

    No statement is inside another, but for those of loops.
    """
    kept = list(statements)
    for place, statement in enumerate(kept):
        if not isinstance(statement, ast.Assign) or not isinstance(statement.targets[0], ast.Name):
            continue
        swapped = _swapped(statement.value)
        if swapped is None:
            continue
        name = statement.targets[0].id
        back: list[ast.Call] = []
        reads = 0
        for other in kept[place + 1 :]:
            here, count = _swaps_back(other, name, swapped[1])
            reads += count
            if isinstance(other, ast.For) and count:
                reads += 1  # a loop may assign it, and read it after
            back += here
            if name in stored(other):
                break
        if back and len(back) == reads:
            statement.value = swapped[0]
            ids = {id(call) for call in back}
            for index in range(place + 1, len(kept)):
                kept[index] = _Unswapped(ids).visit(kept[index])
    return kept


def _swapped(node: ast.expr) -> tuple[ast.expr, list[str]] | None:
    """Return what `x.swapaxes(1, 2)` swaps, and its axes."""
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "swapaxes"
    ):
        return node.func.value, sorted(map(ast.unparse, node.args))
    return None


def _swaps_back(statement: ast.stmt, name: str, axes: list[str]) -> tuple[list[ast.Call], int]:
    """Return the calls that swap a variable by these axes, and how often it is read at all."""
    calls: list[ast.Call] = []
    reads = 0
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load):
            reads += 1
        found = _swapped(node) if isinstance(node, ast.Call) else None
        if isinstance(node, ast.Call) and found is not None:
            is_same = isinstance(found[0], ast.Name) and found[0].id == name and found[1] == axes
            calls += [node] if is_same else []
    return calls, reads


class _Unswapped(ast.NodeTransformer):
    def __init__(self, calls: set[int]) -> None:
        self.calls = calls

    def visit_Call(self, node: ast.Call) -> ast.expr:
        if id(node) in self.calls:
            assert isinstance(node.func, ast.Attribute)
            return node.func.value
        self.generic_visit(node)
        return node
