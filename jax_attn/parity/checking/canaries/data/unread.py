"""Find parameters that no output depends on, such as experts that no input is routed to.

If gradients are compared, they show these parameters (`checking.probes`); otherwise a forward
pass does.
"""

from typing import Any

import torch
from torch._ops import OpOverload

from jax_attn.parity.bugs.planting import run_planted
from jax_attn.parity.checking.canaries.findings import DoubtsAndNotes
from jax_attn.parity.checking.prepared import Prepared
from jax_attn.parity.judge.finding import Finding
from jax_attn.parity.judge.text import quoted
from jax_attn.parity.run.modes.constants import Kwargs, tensors_of
from jax_attn.parity.run.modes.float64_mode import Float64, is_view


class _Reads(Float64):
    """Float64 that records the storages that operators read, unless the result has no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[int] = set()
        self.parameters: dict[str, int] = {}

    def run_on(self, module: torch.nn.Module) -> None:
        self.parameters = {
            name: p.untyped_storage().data_ptr() for name, p in module.named_parameters()
        }

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple = (), kwargs: Kwargs | None = None
    ) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if not is_view(func) and (not isinstance(result, torch.Tensor) or result.numel()):
            read = tensors_of((args, dict(kwargs or {})))
            self.storages.update(x.untyped_storage().data_ptr() for x in read)
        return result


def try_unread(prepared: Prepared) -> DoubtsAndNotes:
    """Note the parameters that no operator reads, if gradients are not compared."""
    if prepared.gradients:
        return DoubtsAndNotes((), ())
    mode = _Reads()
    if run_planted(prepared.reference, mode) is None:
        return DoubtsAndNotes((), ())
    unread = [name for name, storage in mode.parameters.items() if storage not in mode.storages]
    if not unread:
        return DoubtsAndNotes((), ())
    them = "them" if unread[1:] else "it"
    note = (
        f"no input reaches {quoted(unread)}: no output is computed from {them}, so a port with "
        f"other numbers there may pass; to show it, use inputs that are routed to {them}"
    )
    return DoubtsAndNotes((), (Finding("unreached-weights", note),))
