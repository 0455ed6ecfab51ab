"""Hold everything that translating uses of torch and that torch does not promise to keep.

`parity_tests/translate/test_private.py` tells when a version of torch moves one of these.
"""

import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch._logging import structured
from torch._logging._internal import DTRACE_ENV_VAR
from torch.export import ExportedProgram
from torch.fx import Node
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.proxy_tensor import _ModuleStackTracer
from torch.utils._sympy.printers import PythonPrinter

SET_GRAD = torch.ops.higher_order.wrap_with_set_grad_enabled
AUTOCAST = torch.ops.higher_order.wrap_with_autocast

Stack = list[traceback.FrameSummary]


class Guard(NamedTuple):
    """Hold a condition on sizes under which torch.export traced.

    Attributes:
      expression: the condition, of sympy.
      is_python: whether the reference's own source asked for it, in place of an operator of torch.
      asked_by: the function that asked for it.
      file, line: the place in the reference's source.
    """

    expression: Any
    is_python: bool
    asked_by: str
    file: str
    line: int


@contextmanager
def seeing_all(kept: Callable[[Stack], Stack]) -> Iterator[None]:
    """Let torch.export see what it leaves out: helpers' frames, and regions of `inference_mode`.

    Each operator has the frames that `kept` keeps, each condition on sizes the innermost of these.
    """

    def record(tracer: Any, stack: traceback.StackSummary) -> traceback.StackSummary:
        return traceback.StackSummary.from_list(kept(list(stack)))

    original = symbolic_shapes.ShapeEnv._get_sloc

    def place(environment: Any, framework_loc: str | None = None) -> Any:
        stack = [
            traceback.FrameSummary(
                frame.f_code.co_filename, line, frame.f_code.co_name, lookup_line=False
            )
            for frame, line in traceback.walk_stack(sys._getframe(1))
        ]
        ignored = symbolic_shapes.uninteresting_files()
        asked = next((frame for frame in stack if frame.filename not in ignored), None)
        kept_frames = kept(stack[::-1])
        user: Any = kept_frames[-1] if kept_frames else None
        return type(original(environment, framework_loc))(framework_loc or asked, user)

    def enter(region: Any) -> None:
        region._outside = torch.is_grad_enabled()
        torch.set_grad_enabled(not region.mode and region._outside)

    def leave(region: Any, *error: Any) -> None:
        torch.set_grad_enabled(region._outside)

    # An inference region is no region to torch.export: let it be one without gradients.
    inference = torch.inference_mode
    with ExitStack() as patches:
        patches.enter_context(patch.object(inference, "__enter__", enter))
        patches.enter_context(patch.object(inference, "__exit__", leave))
        patches.enter_context(patch.object(_ModuleStackTracer, "_filter_traceback_frames", record))
        patches.enter_context(patch.object(symbolic_shapes.ShapeEnv, "_get_sloc", place))
        yield


@contextmanager
def training_readers(is_reference: Callable[[str], bool]) -> Iterator[set[torch.nn.Module]]:
    """Record the modules whose `training` the reference's own source reads.

    is_reference: whether a file is the reference's.
    """
    readers: set[torch.nn.Module] = set()

    def read(module: torch.nn.Module) -> bool:
        if is_reference(sys._getframe(1).f_code.co_filename):
            readers.add(module)
        return bool(vars(module)["training"])

    def write(module: torch.nn.Module, value: bool) -> None:
        vars(module)["training"] = value

    # A property of the class is asked before the attribute of the module.
    with patch.object(torch.nn.Module, "training", property(read, write), create=True):
        yield readers


def guards(program: ExportedProgram) -> list[Guard]:
    """Return the conditions on sizes under which a program was traced."""
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and hasattr(value, "fake_mode"):
            environment = value.fake_mode.shape_env
            return [_guard(each) for each in environment.guards] if environment else []
    return []


def _guard(guard: Any) -> Guard:
    framework, user = guard.sloc.framework_loc, guard.sloc.maybe_user_loc
    asked = (getattr(framework, "filename", None), getattr(framework, "lineno", None))
    place = (getattr(user, "filename", ""), getattr(user, "lineno", None) or 0)
    return Guard(guard.expr, asked == place, getattr(framework, "name", ""), *place)


def expression(size: Any) -> Any:
    """Return the sympy expression of a symbolic size, or the number itself."""
    if isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return size.node.expr
    return size


def printed(value: Any) -> str:
    """Write a sympy expression of sizes as Python."""
    return PythonPrinter().doprint(value)


def unbacked(node: Node) -> bool:
    """Return whether an operator makes a size that depends on the values of a tensor."""
    return bool(node.meta.get("unbacked_bindings"))


def is_unbacked(value: Any) -> bool:
    """Return whether a size of a value of the graph depends on the values of a tensor."""
    is_known = isinstance(value, (torch.Tensor, torch.SymInt, torch.SymFloat, list, tuple))
    return is_known and bool(symbolic_shapes.free_unbacked_symbols(value))


def is_vectorized() -> bool:
    """Return whether the code that runs is called by `torch.vmap`, or is differentiated."""
    return torch._C._functorch.peek_interpreter_stack() is not None


@contextmanager
def _trace_removed() -> Iterator[None]:
    """Have `draft_export` write its log, which it leaves open, to a folder that ends with it."""
    with TemporaryDirectory() as folder, patch.dict(os.environ, {DTRACE_ENV_VAR: folder}):
        try:
            yield
        finally:
            for reference in list(logging._handlerList):  # type: ignore[attr-defined]
                handler = reference()
                if getattr(handler, "root_dir", None) == folder:
                    handler.close()


def drafted(
    reference: torch.nn.Module, options: Mapping[str, Any]
) -> list[tuple[str, str, list[tuple[str, int]]]]:
    """Return what a draft of an export goes past: the kind, what of, and the files and lines."""
    with _trace_removed():
        report: Any = torch.export.draft_export(reference, **options)._report  # type: ignore[attr-defined]
    # The report lists only files that no earlier trace of this process has numbered.
    files = {number: file for file, number in structured.INTERN_TABLE.items()}
    found = []
    for failure in report.failures:
        stack = failure.data.get("user_stack") or failure.data.get("stack") or []
        places = [(files.get(frame["filename"], ""), int(frame["line"])) for frame in stack]
        subject = failure.data.get("expr") or failure.data.get("op") or ""
        found.append((failure.failure_type.name, str(subject), places))
    return found


def keep(operator: torch._ops.OpOverload) -> None:
    """Keep calls of an operator whose result nobody uses."""
    torch.fx.node.has_side_effect(operator)
