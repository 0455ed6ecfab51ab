"""Buffers at values that do nothing: a running mean of 0, a temperature of 1."""

from typing import Any

import torch

from jax_attn.parity.checking.canaries.findings import DoubtsAndNotes
from jax_attn.parity.checking.canaries.planted import run_planted
from jax_attn.parity.checking.prepared import Prepared
from jax_attn.parity.judge.text import quoted
from jax_attn.parity.run.modes.float64_mode import Float64

_NEUTRAL = (0.0, 1.0)
"""0 changes nothing that it is added to, 1 nothing that it multiplies or divides."""


def try_neutral_buffers(prepared: Prepared) -> DoubtsAndNotes:
    """Note those that would change the outputs at other values, in one run for all of one name."""
    alike: dict[tuple[str, float], list[str]] = {}
    for name, buffer in prepared.reference.module.named_buffers():
        if buffer.is_floating_point() and buffer.numel():
            first = float(buffer.flatten()[0])
            if first in _NEUTRAL and bool((buffer == first).all()):
                alike.setdefault((name.rpartition(".")[2], first), []).append(name)
    notes = [
        _note(names, value)
        for (_, value), names in alike.items()
        if _changes_outputs(prepared, {*names})
    ]
    return DoubtsAndNotes((), tuple(notes))


def _changes_outputs(prepared: Prepared, names: set[str]) -> bool:
    """Whether other values of these buffers would be seen."""
    reference = prepared.reference
    call = reference.call or torch.nn.Module.__call__

    def with_others(module: torch.nn.Module, *args: Any, **inputs: Any) -> Any:
        for name, x in module.named_buffers():
            if name in names:
                x += torch.linspace(0.25, 0.75, x.numel(), dtype=x.dtype).reshape(x.shape)
        return call(module, *args, **inputs)

    run = run_planted(reference.called(with_others), Float64())
    return run is not None and prepared.would_fail(run)


def _note(names: list[str], value: float) -> str:
    s, are, them = ("s", "are", "them") if names[1:] else ("", "is", "it")
    return (
        f"buffer{s} {quoted(names)} of the reference {are} {value:g} throughout, so a port that "
        f"leaves {them} out may pass; what would show it: other numbers there on both sides, such "
        "as those of a trained model"
    )
