"""Canaries of two equal inputs: a port could read either in place of the other."""

from itertools import combinations

import numpy as np

from jax_attn.parity.bugs.planting import run_planted
from jax_attn.parity.bugs.tensors import named_inputs, with_inputs
from jax_attn.parity.checking.canaries.findings import DoubtsAndNotes, doubt
from jax_attn.parity.checking.canaries.seen import same
from jax_attn.parity.checking.prepared import Prepared
from jax_attn.parity.run.inputs_and_runs import is_float
from jax_attn.parity.run.modes.float64_mode import Float64


def try_equal_inputs(prepared: Prepared) -> DoubtsAndNotes:
    """Doubt two equal inputs if the reference distinguishes them."""
    doubts = []
    for (a, given), (b, other) in combinations(named_inputs(prepared.reference).items(), 2):
        if not _are_one(given, other) or (is_float(given.dtype) and prepared.gradients):
            continue  # gradients distinguish two floating inputs
        if _tells_apart(prepared, a, b, np.roll(given, 1, np.argmax(given.shape))):
            remedy = "arrays that differ"
            remedy += ", or gradients=True" if is_float(given.dtype) else ""
            bug = f"that inputs {a!r} and {b!r} are swapped"
            doubts.append(doubt("swapped-inputs", bug, "they are the same array", remedy))
    return DoubtsAndNotes(tuple(doubts), ())


def _are_one(a: np.ndarray, b: np.ndarray) -> bool:
    """Return whether two inputs are equal and not constant; other canaries try constant ones."""
    return a.dtype == b.dtype and np.array_equal(a, b) and a.size > 0 and (a != a.flat[0]).any()


def _tells_apart(prepared: Prepared, a: str, b: str, value: np.ndarray) -> bool:
    """Return whether a new value of either input fails outputs, and in a different way for each."""
    runs = [
        run_planted(with_inputs(prepared.reference, {name: value}), Float64()) for name in (a, b)
    ]
    if None in runs:
        return False
    first, second = (run.kinds["output"] for run in runs if run)
    moved = all(run and prepared.would_fail(run) for run in runs)
    return moved and any(not same(first[name], second[name]) for name in first)
