"""Fold what a person would not write: pairs of transposes, sums with nothing, unread variables."""

import ast
from collections.abc import Sequence
from typing import Any

from jax_attn.translate.rules.expression import stored


def _swapped(node: ast.expr) -> tuple[ast.expr, list[str]] | None:
    """Return what `x.swapaxes(1, 2)` swaps, and its axes."""
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "swapaxes"
    ):
        return node.func.value, sorted(map(ast.unparse, node.args))
    return None


def _moved(node: ast.expr) -> tuple[Any, ...] | None:
    """Return the two axes of a `jnp.moveaxis(x, a, b)`."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "jnp.moveaxis":
        return tuple(ast.literal_eval(each) for each in node.args[1:])
    return None


def _places(index: ast.expr) -> list[ast.expr] | None:
    """Return the parts of an index that only keeps axes and adds new ones, else None."""
    parts = index.elts if isinstance(index, ast.Tuple) else [index]
    return list(parts) if {*map(ast.unparse, parts)} <= {":", "None", "..."} else None


def _is_rest(node: ast.expr) -> bool:
    """Return whether a part of an index is `...`."""
    return isinstance(node, ast.Constant) and node.value is ...


def _merged(first: list[ast.expr], second: list[ast.expr]) -> list[ast.expr] | None:
    """Return one index for two that follow each other, where that can be told without the rank."""
    rest = list(first)
    found: list[ast.expr] = []
    for position, part in enumerate(second):
        if isinstance(part, ast.Slice):
            if rest and _is_rest(rest[0]):
                return None
            found.append(rest.pop(0) if rest else part)
        elif _is_rest(part):
            if any(not isinstance(after, ast.Constant) for after in second[position + 1 :]):
                return None
            if not any(map(_is_rest, rest)):
                rest.append(part)
            return [*found, *rest, *second[position + 1 :]]
        else:
            found.append(part)
    return [*found, *rest]


def _spelled(node: ast.Subscript) -> list[list[ast.expr]] | None:
    """Return the indices of `jnp.arange(n)[...][...]`, whose rank is known, without `...`."""
    assert isinstance(node.value, ast.Subscript)
    base = node.value.value
    if not isinstance(base, ast.Call) or ast.unparse(base.func) != "jnp.arange":
        return None
    rank = 1
    spelled: list[list[ast.expr]] = []
    for index in (node.value.slice, node.slice):
        parts = _places(index)
        if parts is None:
            return None
        is_rest = [*map(_is_rest, parts)]
        missing = rank - sum(isinstance(each, ast.Slice) for each in parts)
        at = is_rest.index(True) if True in is_rest else len(parts)
        whole = [ast.Slice() for _ in range(missing)]
        spelled.append([*parts[:at], *whole, *parts[at + 1 :]])
        rank = len(spelled[-1])
    return spelled


def _repeated_heads(node: ast.expr) -> ast.expr | None:
    """Return the heads that a `repeat_kv` repeats, which jax.nn's attention does by itself.

    The pattern is `jnp.broadcast_to(k[:, :, None], (B, K, G, T, H)).reshape(B, N, T, H)`.
    """
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return None
    wide = node.func.value
    if node.func.attr != "reshape" or len(node.args) != 4 or not isinstance(wide, ast.Call):
        return None
    if ast.unparse(wide.func) != "jnp.broadcast_to":
        return None
    source, shape = wide.args
    if not isinstance(source, ast.Subscript) or not isinstance(shape, ast.Tuple):
        return None
    if len(shape.elts) != 5:
        return None
    is_same = all(
        ast.unparse(shape.elts[wider]) == ast.unparse(node.args[axis])
        for wider, axis in ((0, 0), (3, 2), (4, 3))
    )
    is_repeated = ast.unparse(source).endswith("[:, :, None]")
    return source.value if is_same and is_repeated else None


def _variable(node: ast.expr) -> ast.expr:
    """Return the variable of `variable[...]`, which operators and methods take as it is."""
    if isinstance(node, ast.Subscript) and _is_rest(node.slice):
        return node.value if ast.unparse(node.value).startswith("self.") else node
    return node


class _Tidy(ast.NodeTransformer):
    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        self.generic_visit(node)
        node.value = _variable(node.value)
        made = node.value
        if node.attr == "shape" and isinstance(made, ast.Call):
            function = ast.unparse(made.func)
            if function == "jnp.zeros_like":
                return ast.Attribute(made.args[0], "shape", ast.Load())
            if function == "jnp.zeros" and isinstance(made.args[0], ast.Tuple):
                return made.args[0]
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        self.generic_visit(node)
        node.left = _variable(node.left)
        return node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        self.generic_visit(node)
        node.operand = _variable(node.operand)
        return node

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        self.generic_visit(node)
        node.value = _variable(node.value)
        if isinstance(node.value, ast.Subscript):
            first, second = _spelled(node) or (_places(node.value.slice), _places(node.slice))
            merged = _merged(first, second) if first is not None and second is not None else None
            if merged is not None:
                index = merged[0] if len(merged) == 1 else ast.Tuple(merged, ast.Load())
                return ast.Subscript(node.value.value, index, ast.Load())
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        if ast.unparse(node.func) == "jax.nn.dot_product_attention":
            for place in (1, 2):
                heads = _swapped(node.args[place])
                if heads is not None and (fewer := _repeated_heads(heads[0])) is not None:
                    node.args[place].func.value = fewer  # type: ignore[attr-defined]
        if (outer := _swapped(node)) and (inner := _swapped(outer[0])) and inner[1] == outer[1]:
            return inner[0]
        if (axes := _moved(node)) is not None and _moved(node.args[0]) == axes[::-1]:
            return node.args[0].args[0]  # type: ignore[attr-defined]
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        node.left, node.right = _variable(node.left), _variable(node.right)
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


def without_unread(statements: list[ast.stmt]) -> list[ast.stmt]:
    """Leave out assignments of names that nothing reads afterwards; no expression has effects."""
    kept: list[ast.stmt] = []
    live: set[str] = set()
    for statement in reversed(statements):
        names = [node for node in ast.walk(statement) if isinstance(node, ast.Name)]
        written = {node.id for node in names if isinstance(node.ctx, ast.Store)}
        read = {node.id for node in names if isinstance(node.ctx, ast.Load)}
        if isinstance(statement, ast.Assign):
            (target,) = statement.targets
            if not written & live or ast.unparse(target) == ast.unparse(statement.value):
                continue
            live -= written
        live |= read
        kept.append(statement)
    return kept[::-1]
