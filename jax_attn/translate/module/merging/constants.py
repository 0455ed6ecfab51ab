"""Find and replace the constants in which copies of a statement may differ."""

import ast
from collections.abc import Mapping, Sequence

from jax_attn.translate.rules.expression import Written


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def constants(statement: ast.stmt) -> list[ast.Constant]:
    """Return the constants that may be an argument of `__init__`, in order.

    These are numbers, but not those that choose among the modules of a list; and what constructors
    are given by name.
    """
    chosen: set[int] = set()
    named: set[int] = set()
    for node in ast.walk(statement):
        if isinstance(node, ast.Subscript) and _is_of_self(node.value):
            chosen.update(map(id, ast.walk(node.slice)))
        if isinstance(node, ast.Call) and any(each.arg == "rngs" for each in node.keywords):
            named.update(id(each.value) for each in node.keywords)
    return [
        node
        for node in ast.walk(statement)
        if isinstance(node, ast.Constant)
        and (_is_number(node.value) or id(node) in named)
        and id(node) not in chosen
    ]


def _is_of_self(node: ast.expr) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    )


def text_of(statement: ast.stmt) -> str:
    """Return a text that is equal for statements that differ in these constants alone.

    A statement of training mode that `apart` names has a text of its own.
    """
    if hasattr(statement, _APART):
        return f"\0{ast.unparse(statement)}"
    found = {id(node): node for node in constants(statement)}.values()
    values = [node.value for node in found]
    try:
        for node in found:
            node.value = "\0"
        return ast.unparse(ast.fix_missing_locations(statement))
    finally:
        for node, value in zip(found, values, strict=True):
            node.value = value


_APART = "_jax_attn_apart"


def apart(evaluated: Sequence[ast.stmt], trained: Sequence[ast.stmt]) -> None:
    """Keep statements of training mode apart that differ in constants from those of eval mode."""
    values: tuple[dict[str, list[str]], ...] = ({}, {})
    for body, found in zip((evaluated, trained), values, strict=True):
        for statement in body:
            own = [repr(node.value) for node in constants(statement)]
            found.setdefault(text_of(statement), []).extend(own)
    for statement in trained:
        text = text_of(statement)
        if values[0].get(text, values[1][text]) != values[1][text]:
            setattr(statement, _APART, True)


class _Replaced(ast.NodeTransformer):
    def __init__(self, by_id: Mapping[int, Written]) -> None:
        self.by_id = by_id

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        return self.by_id.get(id(node), node)


def replaced(statement: ast.stmt, by_id: Mapping[int, Written]) -> ast.stmt:
    """Put expressions in the places of constants, which are given by their identity."""
    return _Replaced(by_id).visit(statement)
