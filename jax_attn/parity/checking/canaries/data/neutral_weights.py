"""Canaries of weights without effect: a running mean of 0, a norm's weight of 1."""

from collections.abc import Iterable, Iterator

import torch

from jax_attn.parity.bugs.planting import run_planted
from jax_attn.parity.bugs.tensors import with_tensors
from jax_attn.parity.checking.canaries.findings import DoubtsAndNotes
from jax_attn.parity.checking.prepared import Prepared
from jax_attn.parity.judge.finding import Finding, StandingNote
from jax_attn.parity.judge.text import quoted
from jax_attn.parity.run.modes.float64_mode import Float64

_NEUTRAL = (0.0, 1.0)
"""Adding 0 has no effect; multiplying or dividing by 1 has none."""

_REMEDY = "other numbers there on both sides, such as those of a trained model"


def try_neutral_weights(prepared: Prepared) -> DoubtsAndNotes:
    """Note neutral weights that would change the outputs at other values; one run for each name.

    A gradient shows that a parameter is read, but not in which formula: 1 + w and exp(w) agree at
    0. A sum has one formula, so a bias is not noted if gradients are compared.
    """
    module = prepared.reference.module
    notes: list[Finding] = list(_left_out(prepared, "buffer", module.named_buffers()))
    if prepared.gradients:
        for value, names in _neutral(module.named_parameters()):
            if "bias" not in names[0].rpartition(".")[2]:
                notes.append(_formula(names, value))
    else:
        notes += _left_out(prepared, "parameter", module.named_parameters())
    return DoubtsAndNotes((), tuple(notes))


def _neutral(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[float, list[str]]]:
    """Yield each neutral value with the tensors that hold only it, grouped by last name."""
    alike: dict[tuple[str, float], list[str]] = {}
    for name, x in tensors:
        if x.is_floating_point() and x.numel():
            first = float(x.detach().flatten()[0])
            if first in _NEUTRAL and bool((x == first).all()):
                alike.setdefault((name.rpartition(".")[2], first), []).append(name)
    return ((value, names) for (_, value), names in alike.items())


def _left_out(
    prepared: Prepared, kind: str, tensors: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[Finding]:
    for value, names in _neutral(tensors):
        if _changes_outputs(prepared, {*names}):
            s, are, them = ("s", "are", "them") if names[1:] else ("", "is", "it")
            yield Finding(
                "neutral-weights",
                f"{kind}{s} {quoted(names)} of the reference {are} {value:g} throughout, so a port "
                f"that leaves {them} out may pass; to show it, use {_REMEDY}",
            )


def _formula(names: list[str], value: float) -> StandingNote:
    s, are, them = ("s", "are", "them") if names[1:] else ("", "is", "it")
    return StandingNote(
        "neutral-formula",
        f"parameter{s} {quoted(names)} of the reference {are} {value:g} throughout, so a port that "
        f"uses {them} in another formula, such as exp(w) for 1 + w, may pass; to show it, use "
        f"{_REMEDY}",
    )


def _changes_outputs(prepared: Prepared, names: set[str]) -> bool:
    """Return whether other values of these buffers or parameters would fail an output."""
    module = prepared.reference.module
    held = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    tied = {id(x) for name, x in held if name in names}
    others = with_tensors(prepared.reference, {name: _other for name, x in held if id(x) in tied})
    run = run_planted(others, Float64())
    return run is not None and prepared.would_fail(run)


def _other(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same kind whose numbers are others."""
    return x + torch.linspace(0.25, 0.75, x.numel(), dtype=x.dtype).reshape(x.shape)
