"""Everything that translating uses of torch and that torch does not promise to keep.

`parity_tests/translate/test_private.py` tells when a version of torch moves one of these.
"""

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch.export import ExportedProgram
from torch.fx import Node
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.proxy_tensor import _ModuleStackTracer
from torch.utils._sympy.printers import PythonPrinter

SET_GRAD = torch.ops.higher_order.wrap_with_set_grad_enabled
AUTOCAST = torch.ops.higher_order.wrap_with_autocast

Stack = list[traceback.FrameSummary]


class Guard(NamedTuple):
    """A condition on sizes under which torch.export traced.

    Attributes:
      expression: the condition, of sympy.
      is_python: whether the reference's own source asked for it, in place of an operator of torch.
      file, line: the place in the reference's source.
    """

    expression: Any
    is_python: bool
    file: str
    line: int


@contextmanager
def whole_stacks(kept: Callable[[Stack], Stack]) -> Iterator[None]:
    """Let torch.export record with each operator the frames that `kept` keeps, not forward alone.

    The conditions on sizes get the innermost of these frames as their place.
    """

    def record(tracer: Any, stack: traceback.StackSummary) -> traceback.StackSummary:
        return traceback.StackSummary.from_list(kept(list(stack)))

    original = symbolic_shapes.ShapeEnv._get_sloc

    def place(environment: Any, framework_loc: str | None = None) -> Any:
        found = original(environment, framework_loc)
        walked = traceback.walk_stack(sys._getframe())
        stack = kept(
            [
                traceback.FrameSummary(
                    frame.f_code.co_filename, line, frame.f_code.co_name, lookup_line=False
                )
                for frame, line in walked
            ][::-1]
        )
        user: Any = stack[-1] if stack else None
        return type(found)(found.framework_loc, user)

    with ExitStack() as patches:
        patches.enter_context(patch.object(_ModuleStackTracer, "_filter_traceback_frames", record))
        patches.enter_context(patch.object(symbolic_shapes.ShapeEnv, "_get_sloc", place))
        yield


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
    return Guard(guard.expr, asked == place, *place)


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


def keep(operator: torch._ops.OpOverload) -> None:
    """Keep calls of an operator whose result nobody uses."""
    torch.fx.node.has_side_effect(operator)
