"""A side of a branch: what a port would leave out, and an input on which it acts."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch


class Side(NamedTuple):
    """One side of a branch. operator: its name and bound. what: the input on which it acts.

    guards: whether it only guards against zero. standing: whether there may be no such input,
    because an integer reaches the bound but may never exceed it. anywhere: whether one call of the
    reference on which it acts shows it for all calls, at whichever site.
    """

    operator: str
    what: str
    guards: bool = False
    standing: bool = False
    anywhere: bool = False


Sides = Iterator[tuple[Side, bool]]
"""Each side, with whether it acts."""


def constant(value: Any) -> float | None:
    """Return a real number, or the one value of a constant tensor; None for anything else."""
    if isinstance(value, complex):
        return None
    if not isinstance(value, torch.Tensor):
        return float(value)
    if value.is_complex() or value.numel() == 0 or value.min() != value.max():
        return None
    return float(value.flatten()[0])
