"""Find the places in the reference's source from which an operator was called."""

import ast
import inspect
import linecache
import os
import re
import traceback
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.fx import Node

# With a separator, as torchvision is no part of torch.
_TORCH = str(Path(torch.__file__).parent) + os.sep
_LAYERS = str(Path(_TORCH, "nn", "modules"))
_CALLERS = str(Path(_LAYERS, "module.py"))
_OURS = str(Path(__file__).parents[2])
_FRAME = re.compile(r'File "(.+?)", line (\d+), in (\S+)')


class Frame(NamedTuple):
    """Hold a place in torch's source: a file, a line, and the function."""

    file: str
    line: int
    function: str

    @property
    def text(self) -> str:
        """Return the source line."""
        return linecache.getline(self.file, self.line).strip()


def is_reference(file: str) -> bool:
    """Return whether a file is the reference's: neither ours nor torch's machinery."""
    if file == _CALLERS or file.startswith(("<", _OURS)):
        return False
    return file.startswith(_LAYERS) or not file.startswith(_TORCH)


@lru_cache(maxsize=256)
def tree_of(file: str) -> ast.Module:
    """Return the syntax tree of a file, an empty one if it is no Python."""
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ast.Module([], [])


@lru_cache(maxsize=64)
def _passing(file: str) -> frozenset[int]:
    """Return the lines on which a function hands all its arguments on, as a decorator's does."""
    lines: set[int] = set()
    for function in ast.walk(tree_of(file)):
        if not isinstance(function, ast.FunctionDef):
            continue
        rest, named = function.args.vararg, function.args.kwarg
        if rest is None or named is None:
            continue
        for call in ast.walk(function):
            if not isinstance(call, ast.Call):
                continue
            options = [ast.unparse(each.value) for each in call.keywords if each.arg is None]
            if f"*{rest.arg}" in map(ast.unparse, call.args) and named.arg in options:
                lines.update(range(call.lineno, (call.end_lineno or call.lineno) + 1))
    return frozenset(lines)


def reference_frames(stack: Iterable[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """Keep the reference's own frames, from the outermost call of the export inwards.

    Decorators are left out, as they only hand on what they are given.
    """
    found = list(stack)
    ours = [index for index, frame in enumerate(found) if frame.filename.startswith(_OURS)]
    # Hooks of ours are on the stack too: what counts is where the export began.
    start = ours[0] + 1 if ours else 0
    return [
        frame
        for frame in found[start:]
        if is_reference(frame.filename) and (frame.lineno or 0) not in _passing(frame.filename)
    ]


def frames(node: Node) -> tuple[Frame, ...]:
    """Return the frames in which an operator ran, from the outermost to the innermost."""
    return _parsed(node.meta.get("stack_trace") or "")


@lru_cache(maxsize=65536)
def _parsed(trace: str) -> tuple[Frame, ...]:
    return tuple(Frame(file, int(line), name) for file, line, name in _FRAME.findall(trace))


def innermost(node: Node) -> Frame:
    """Return the frame in which an operator ran; an empty one if it is not known."""
    return (frames(node) or (Frame("", 0, ""),))[-1]


def forward_frame(forward: Callable[..., Any], stack: tuple[Frame, ...], outside: int) -> int:
    """Return the index of a forward's own frame in a stack.

    Args:
      forward: the module's forward; decorators that keep `__wrapped__` are looked through.
      stack: the frames of an operator that ran in it.
      outside: how many frames surround the call of the module.
    """
    inner = inspect.unwrap(forward)
    code = getattr(getattr(inner, "__func__", inner), "__code__", None)
    places = range(outside, len(stack))
    for index in places:
        if code and (stack[index].file, stack[index].function) == (code.co_filename, code.co_name):
            return index
    return next((index for index in places if stack[index].function == "forward"), outside)
