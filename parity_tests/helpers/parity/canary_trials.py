"""What canaries say of a torch function, or module, on its inputs: no port takes part."""

from typing import NamedTuple

import torch

from jax_attn.parity.checking import canaries
from jax_attn.parity.checking.prepared import Prepared
from jax_attn.parity.judge.finding import StandingNote
from jax_attn.parity.run.inputs_and_runs import Inputs, float_dtype
from jax_attn.parity.run.reference import Reference

QUIET = ([], [])


class Tried(NamedTuple):
    """Kinds of doubts and of notes, each as often as it is found; standing notes; all sentences."""

    doubts: list[str]
    notes: list[str]
    standing: list[str]
    said: str


def try_on(call, inputs, dtype: str = "float32", gradients: bool = False) -> Tried:
    bound = Inputs.of(inputs, float_dtype(dtype))
    if isinstance(call, torch.nn.Module):
        reference = Reference(call, None, bound)
    else:
        reference = Reference(torch.nn.Module(), lambda module, *a, **k: call(*a, **k), bound)
    _, doubts, notes = canaries.try_canaries(Prepared(reference, dtype, gradients=gradients))
    return Tried(
        sorted(doubt.kind for doubt in doubts),
        sorted(note.kind for note in notes),
        sorted(note.kind for note in notes if isinstance(note, StandingNote)),
        "\n".join((*doubts, *notes)),
    )


def attend(query, key, value, allowed=None, added=0.0):
    scores = query @ key.mT / query.shape[-1] ** 0.5 + added
    if allowed is not None:
        scores = scores.masked_fill(allowed == 0, -torch.inf)
    return torch.softmax(scores, -1) @ value
