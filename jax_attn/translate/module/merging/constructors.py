"""Write calls that make modules alike, where copies of them differ in what they leave out."""

import ast
import copy
import inspect
from collections.abc import Sequence
from typing import Any

from flax import nnx

from jax_attn.translate.rules.expression import names_in, parsed

# A list of modules that differ in more is written out.
_MOST_DIFFERENT = 3


def _layer(node: ast.AST) -> type | None:
    """Return the layer of NNX that a call makes."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return None
    found = (
        getattr(nnx, node.func.attr, None) if ast.unparse(node.func).startswith("nnx.") else None
    )
    is_layer = inspect.isclass(found) and issubclass(found, nnx.Module)
    return found if is_layer and found not in (nnx.List, nnx.Dict) else None


def parameter_names(node: ast.Call) -> list[str]:
    """Return the names of the arguments that a layer of NNX is given by position."""
    layer = _layer(node)
    return [*_parameters(layer)][: len(node.args)] if layer else []


def _parameters(layer: type) -> dict[str, inspect.Parameter]:
    own = dict(inspect.signature(layer.__init__).parameters)  # type: ignore[misc]
    return {name: parameter for name, parameter in own.items() if name != "self"}


def _calls(statement: ast.stmt) -> list[ast.Call]:
    return [node for node in ast.walk(statement) if isinstance(node, ast.Call) and _layer(node)]


def _default(layer: type, name: str, like: ast.expr) -> ast.expr:
    value: Any = _parameters(layer)[name].default
    if isinstance(like, ast.Tuple) and isinstance(value, int):
        return ast.Tuple([ast.Constant(value) for _ in like.elts], ast.Load())
    return ast.Constant(value)


def _with_defaults(statements: Sequence[ast.stmt]) -> list[ast.stmt]:
    """Give the layers of NNX all options that those of another statement are given."""
    made = [copy.deepcopy(statement) for statement in statements]
    for calls in zip(*map(_calls, made), strict=False):
        options = {each.arg: each.value for call in calls for each in call.keywords if each.arg}
        layers = {_layer(call) for call in calls}
        if len(layers) > 1:
            continue
        (layer,) = layers
        assert layer is not None
        for call in calls:
            given = {each.arg: each for each in call.keywords}
            call.keywords = [
                given[name] if name in given else ast.keyword(name, _default(layer, name, like))
                for name, like in options.items()
            ]
    return made


class _Explicit(ast.NodeTransformer):
    def visit_ListComp(self, node: ast.ListComp) -> ast.expr:
        (count,) = node.generators[0].iter.args  # type: ignore[attr-defined]
        return ast.List([copy.deepcopy(node.elt) for _ in range(count.value)], ast.Load())


def alike(statements: Sequence[ast.stmt]) -> list[list[ast.stmt]]:
    """Return the ways in which statements of `__init__` may be written, the plainest first."""
    ways = [list(statements)]
    if len({*map(ast.unparse, statements)}) > 1:
        explicit = [_Explicit().visit(copy.deepcopy(each)) for each in statements]
        ways += [_with_defaults(statements), explicit, _with_defaults(explicit)]
    return ways


class _Constructed(ast.NodeTransformer):
    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        if any(each.arg == "rngs" for each in node.keywords):
            node.keywords = [
                each
                for each in node.keywords
                if not (isinstance(each.value, ast.Constant) and each.value.value is None)
            ]
        if ast.unparse(node.func) == "nnx.List" and isinstance(node.args[0], ast.List):
            node.args = [_repeated(node.args[0])]
        return node


def _repeated(node: ast.List) -> ast.expr:
    """Write a list of modules that differ in little as a loop."""
    calls = [each for each in node.elts if isinstance(each, ast.Call)]
    if len(calls) < 2 or len(calls) < len(node.elts):
        return node
    heads = {ast.unparse(ast.Call(call.func, call.args, [])) for call in calls}
    names = [[each.arg for each in call.keywords] for call in calls]
    if len(heads) > 1 or any(each != names[0] for each in names):
        return node
    values = {
        name: [ast.unparse(call.keywords[place].value) for call in calls]
        for place, name in enumerate(names[0])
    }
    different = [str(name) for name, texts in values.items() if len(set(texts)) > 1]
    if len(different) > _MOST_DIFFERENT:
        return node
    if {*different} & _names_beside(calls[0], different):
        return node
    element = ast.unparse(_with_variables(calls[0], different))
    if not different:
        return parsed(f"[{element} for _ in range({len(calls)})]")
    rows = list(zip(*(values[name] for name in different), strict=True))
    items = ", ".join(row[0] if len(row) == 1 else f"({', '.join(row)})" for row in rows)
    return parsed(f"[{element} for {', '.join(different)} in ({items})]")


def _names_beside(call: ast.Call, names: Sequence[str]) -> set[str]:
    """Return the variables that a call reads, except in some of its arguments."""
    kept = [*call.args, *(each.value for each in call.keywords if each.arg not in names)]
    return {name for each in kept for name in names_in(each)}


def _with_variables(call: ast.Call, names: Sequence[str]) -> ast.Call:
    keywords = [
        ast.keyword(each.arg, ast.Name(each.arg) if each.arg in names and each.arg else each.value)
        for each in call.keywords
    ]
    return ast.Call(call.func, call.args, keywords)


def constructed(statement: ast.stmt) -> ast.stmt:
    """Leave out arguments that are None, which is their default, and write loops for lists."""
    return _Constructed().visit(statement)
