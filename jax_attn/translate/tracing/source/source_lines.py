"""Read in torch's own source which statement computed a value, and the name that it got."""

import ast
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jax_attn.translate.tracing.source.frames import Frame, tree_of


@dataclass(frozen=True)
class Statement:
    """Hold a statement of torch's source, by its place, with the names that it assigns.

    `targets` is empty unless the statement assigns; `returns` are the names that a `return` lists,
    None where it lists an expression that is no name.
    """

    file: str
    line: int
    targets: tuple[str | None, ...] = ()
    returns: tuple[str | None, ...] = ()


@lru_cache(maxsize=256)
def _statements(file: str) -> tuple[ast.stmt, ...]:
    return tuple(each for each in ast.walk(tree_of(file)) if isinstance(each, ast.stmt))


@lru_cache(maxsize=65536)
def _enclosing(file: str, line: int) -> tuple[ast.stmt | None, ast.stmt | None]:
    """Return the innermost simple statement and the innermost function that contain a line."""
    statement: ast.stmt | None = None
    function: ast.stmt | None = None
    for node in _statements(file):
        if not node.lineno <= line <= (node.end_lineno or 0):
            continue
        is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        if is_function and (function is None or node.lineno >= function.lineno):
            function = node
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        if statement is None or node.lineno >= statement.lineno:
            statement = node
    return statement, function


def _names(target: ast.expr | None) -> tuple[str | None, ...]:
    if isinstance(target, (ast.Tuple, ast.List)):
        return tuple(each.id if isinstance(each, ast.Name) else None for each in target.elts)
    return (target.id if isinstance(target, ast.Name) else None,)


def _root_name(value: ast.expr) -> str | None:
    """Return the name that an expression such as `cos.to(dtype)` is about."""
    while isinstance(value, (ast.Call, ast.Attribute, ast.Subscript)):
        value = value.func if isinstance(value, ast.Call) else value.value
    return value.id if isinstance(value, ast.Name) and value.id != "self" else None


def _written_in_place(value: ast.expr) -> tuple[str, ...]:
    """Return the name of what `x.clamp_(0, 1)` writes into."""
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute):
        return ()
    name = _root_name(value) if value.func.attr.endswith("_") else None
    return (name,) if name is not None else ()


@lru_cache(maxsize=65536)
def statement(frame: Frame) -> Statement:
    """Return the statement of a frame's line."""
    found, _ = _enclosing(frame.file, frame.line)
    if found is None:
        return Statement(frame.file, frame.line)
    targets: tuple[str | None, ...] = ()
    returns: tuple[str | None, ...] = ()
    if isinstance(found, ast.Assign):
        targets = _names(found.targets[0])
    elif isinstance(found, (ast.AnnAssign, ast.AugAssign)):
        targets = _names(found.target)
    elif isinstance(found, ast.Expr):
        targets = _written_in_place(found.value)
    elif isinstance(found, ast.Return) and found.value is not None:
        listed = found.value.elts if isinstance(found.value, ast.Tuple) else [found.value]
        returns = tuple(_root_name(value) for value in listed)
    return Statement(frame.file, found.lineno, targets, returns)


@lru_cache(maxsize=4096)
def _function_names(file: str, line: int) -> tuple[tuple[str, str], ...]:
    _, function = _enclosing(file, line)
    pairs = []
    for node in ast.walk(function) if function else ():
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Name)
            and isinstance(node.targets[0], ast.Name)
        ):
            pairs.append((node.targets[0].id, node.value.id))
    return tuple(pairs)


@lru_cache(maxsize=4096)
def return_names(frame: Frame, count: int) -> tuple[str | None, ...]:
    """Return the names that the function of a frame returns `count` values by."""
    _, function = _enclosing(frame.file, frame.line)
    for node in ast.walk(function) if function else ():
        if (
            isinstance(node, ast.Return)
            and isinstance(node.value, ast.Tuple)
            and len(node.value.elts) == count
        ):
            return tuple(map(_root_name, node.value.elts))
    return (None,) * count


@lru_cache(maxsize=4096)
def _function(file: str, line: int, name: str) -> ast.FunctionDef | None:
    """Return the function of a name that starts at a line, or at its decorators' first line."""
    return min(
        (
            each
            for each in _statements(file)
            if isinstance(each, ast.FunctionDef) and each.name == name and each.lineno >= line
        ),
        key=lambda each: each.lineno,
        default=None,
    )


@lru_cache(maxsize=4096)
def unpacked(file: str, line: int, function: str, name: str) -> tuple[str | None, ...]:
    """Return the names that a function unpacks an argument into, if it does.

    Args:
      file: the function's file.
      line: the first line of the function, or of its first decorator.
      function: its name.
      name: the argument.
    """
    found = _function(file, line, function)
    for node in ast.walk(found) if found else ():
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Name)
            and node.value.id == name
            and isinstance(node.targets[0], ast.Tuple)
        ):
            return _names(node.targets[0])
    return ()


def aliases(frame: Frame) -> tuple[tuple[str, str], ...]:
    """Return the pairs of `alias = name` in the function of a frame."""
    return _function_names(frame.file, frame.line)


@lru_cache(maxsize=4096)
def loop_variable(frame: Frame) -> str | None:
    """Return the name of the element in the `for` statement around a line, if there is one."""
    best: ast.For | None = None
    for node in _statements(frame.file):
        if (
            isinstance(node, ast.For)
            and node.lineno <= frame.line <= (node.end_lineno or 0)
            and (best is None or node.lineno >= best.lineno)
        ):
            best = node
    if best is None:
        return None
    return _names(best.target)[-1]


@lru_cache(maxsize=4096)
def passed_name(frame: Frame, function: Callable[..., Any], parameter: str) -> str | None:
    """Return the variable that the statement of a frame passes on as a parameter of a function."""
    found, _ = _enclosing(frame.file, frame.line)
    order = list(inspect.signature(function).parameters)[1:]
    for node in ast.walk(found) if found else ():
        if not isinstance(node, ast.Call):
            continue
        passed = {each.arg: each.value for each in node.keywords}
        passed |= dict(zip(order, node.args, strict=False))
        value = passed.get(parameter)
        if isinstance(value, ast.Name):
            return value.id
    return None


def source_of(function: Callable[..., Any]) -> ast.AST:
    """Return the syntax tree of a function, an empty one if it has no source."""
    code = getattr(function, "__code__", None)
    found = _function(code.co_filename, code.co_firstlineno, code.co_name) if code else None
    return found or ast.Module([], [])


def shape_names(function: Callable[..., Any]) -> Mapping[tuple[str, int], str]:
    """Return the names that a function gives to sizes of its arguments, by argument and axis.

    These are the names in `batch, length, _ = x.shape` and in `length = x.size(1)`.
    """
    found = source_of(function)
    names: dict[tuple[str, int], str] = {}
    stored: dict[str, int] = {}
    for node in ast.walk(found):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            stored[node.id] = min(node.lineno, stored.get(node.id, node.lineno))
    for node in ast.walk(found):
        if not isinstance(node, ast.Assign):
            continue
        target = node.targets[0]
        argument, axis = _shape_of(node.value)
        if argument is None or stored.get(argument, node.lineno) < node.lineno:
            continue
        if axis is not None:
            axes = {axis: target}
        elif isinstance(target, (ast.Tuple, ast.List)):
            axes = _axes(target.elts)
        else:
            continue
        for place, each in axes.items():
            if isinstance(each, ast.Name) and not each.id.startswith("_"):
                names.setdefault((argument, place), each.id)
    return names


def _axes(targets: Sequence[ast.expr]) -> dict[int, ast.expr]:
    """Return what a shape is unpacked into, by axis: from the end after a `*rest`."""
    kinds = [isinstance(each, ast.Starred) for each in targets]
    rest = kinds.index(True) if True in kinds else len(targets)
    return {at if at < rest else at - len(targets): each for at, each in enumerate(targets)}


def _shape_of(value: ast.expr) -> tuple[str | None, int | None]:
    """Return the argument whose shape an expression reads, and the axis if it reads only one."""
    axis: int | None = None
    if isinstance(value, ast.Subscript) and ast.unparse(value.value).endswith(".shape"):
        if isinstance(value.slice, ast.Constant) and isinstance(value.slice.value, int):
            axis = value.slice.value
        elif not (isinstance(value.slice, ast.Slice) and value.slice.lower is None):
            return None, None
        value = value.value
    elif isinstance(value, ast.Call) and ast.unparse(value.func).endswith(".size"):
        if value.args and isinstance(value.args[0], ast.Constant):
            axis = value.args[0].value if isinstance(value.args[0].value, int) else None
        value = value.func
    if not isinstance(value, ast.Attribute) or value.attr not in ("shape", "size"):
        return None, None
    return (value.value.id, axis) if isinstance(value.value, ast.Name) else (None, None)
