"""Find the functions of torch's source that its modules call, such as `rotate_half`."""

import ast
import inspect
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from jax_attn.translate.tracing.source.frames import is_reference, tree_of


class Helper(NamedTuple):
    """Hold a function, with the names of a file in which it is called by a name."""

    names: dict[str, Any]
    name: str
    function: Callable[..., Any]


def _package(file: str) -> str | None:
    """Return the package of a file that is installed; None if it is a file of the user's own."""
    parts = Path(file).parts
    if "site-packages" in parts:
        return parts[parts.index("site-packages") + 1]
    return "python" if file.startswith(sysconfig.get_path("stdlib")) else None


def _file_of(kind: type) -> str:
    return getattr(sys.modules.get(kind.__module__), "__file__", None) or ""


def helpers(reference: torch.nn.Module) -> list[Helper]:
    """Return the functions that modules of the reference call by name.

    These are functions of the packages of the modules, and the user's own.
    """
    kinds = dict.fromkeys(type(module) for module in reference.modules())
    packages = {None, *(_package(_file_of(kind)) for kind in kinds)}
    waiting = [
        function
        for kind in kinds
        for base in kind.__mro__
        for function in vars(base).values()
        if isinstance(function, types.FunctionType)
    ]
    seen: set[int] = set()
    found: dict[tuple[int, str], Helper] = {}
    while waiting:
        function = inspect.unwrap(waiting.pop())
        code = getattr(function, "__code__", None)
        if code is None or id(function) in seen or not is_reference(code.co_filename):
            continue
        seen.add(id(function))
        called = _only_called(code.co_filename)
        for name in _names(code):
            value = function.__globals__.get(name)
            if not isinstance(value, types.FunctionType):
                continue
            waiting.append(value)
            inner = inspect.unwrap(value)
            file = inner.__code__.co_filename
            if name in called and is_reference(file) and _package(file) in packages:
                found[id(function.__globals__), name] = Helper(function.__globals__, name, value)
    return list(found.values())


def _names(code: types.CodeType) -> Iterator[str]:
    """Iterate over the global names that a function reads, and those defined in it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


@lru_cache(maxsize=64)
def _only_called(file: str) -> frozenset[str]:
    """Return the names of a file that it calls, and never reads otherwise.

    Another function may stand in for one of these: nobody compares it or keeps it.
    """
    nodes = list(ast.walk(tree_of(file)))
    called = {id(node.func): node.func for node in nodes if isinstance(node, ast.Call)}
    read = {
        node.id
        for node in nodes
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and id(node) not in called
    }
    return frozenset(
        node.id for node in called.values() if isinstance(node, ast.Name) and node.id not in read
    )
