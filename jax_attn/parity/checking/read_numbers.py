"""Find numbers that Python reads out of the reference's tensors; decisions on them are not traced.

Calls of `.tolist()` and `.numpy()` are not found, because torch does not report them to a mode.
"""

from typing import Any

import torch
from torch._ops import OpOverload

from jax_attn.parity.checking.prepared import Prepared
from jax_attn.parity.judge.finding import StandingNote
from jax_attn.parity.judge.text import joined
from jax_attn.parity.run.modes.constants import Kwargs, mark, sources_of
from jax_attn.parity.run.modes.float64_mode import Float64
from jax_attn.parity.run.modes.lines import calling_line
from jax_attn.parity.run.modes.mode import Mode

_MARK = "_compares_floats"
_SHOWN = 3


def read_numbers(prepared: Prepared) -> tuple[StandingNote, ...]:
    """Return a note on the lines at which a forward pass reads floats, or comparisons of floats.

    The pass runs in float64, since torch may choose other kernels under a mode.
    """
    reference = prepared.reference
    _ = reference.near_decisions  # compute it first, because its modes set the same marks
    mode = _Reading()
    with mode:
        reference.under(Float64(), {})
    if not mode.lines:
        return ()
    lines = joined([*mode.lines][:_SHOWN])
    note = (
        f"Python reads a number out of a tensor of the reference at {lines} (`.item()`, `float()` "
        "or `if`); a decision that depends on it was checked only for these inputs; to check "
        "another decision, add a check on inputs that lead to it"
    )
    return (StandingNote("reads-numbers", note),)


class _Reading(Mode):
    """Recorder of lines that read numbers computed from floating inputs, parameters or buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[str, None] = {}

    def dispatched(self, func: OpOverload, args: tuple, kwargs: Kwargs) -> Any:
        depends = sources_of(func, args, kwargs) is None or any(
            getattr(x, _MARK, False) for x in args if isinstance(x, torch.Tensor)
        )
        result = func(*args, **kwargs)
        if func.overloadpacket.__name__ == "_local_scalar_dense":
            if depends:
                self.lines[calling_line()] = None
            return result
        mark(result, None if depends else frozenset())
        if isinstance(result, torch.Tensor) and result.dtype is torch.bool:
            setattr(result, _MARK, depends)
        return result
