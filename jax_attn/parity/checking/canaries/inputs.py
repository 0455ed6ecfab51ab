"""Canaries of inputs that are alike: along an axis, one like another, or only one of a kind."""

from collections.abc import Mapping
from itertools import combinations

import numpy as np

from jax_attn.parity.bugs.planting import run_planted
from jax_attn.parity.bugs.softmax import DRAWN
from jax_attn.parity.bugs.tensors import with_inputs
from jax_attn.parity.checking.canaries.findings import doubt
from jax_attn.parity.checking.canaries.seen import same
from jax_attn.parity.checking.prepared import Prepared
from jax_attn.parity.judge.finding import Findings, findings
from jax_attn.parity.run.inputs_and_runs import is_float

# --- the same along an axis whose positions are mixed ---------------------------------------------


def try_positions(prepared: Prepared) -> Findings:
    """Doubt inputs that are the same along an axis whose positions the reference mixes.

    This needs no softmax."""
    doubts = []
    for name, x in prepared.inputs.by_name.items():
        for axis in range(x.ndim - 1) if is_float(x.dtype) else ():
            alike = x.shape[axis] > 1 and (x == x.take([0], axis)).all()
            if alike and _joins(prepared, name, x, axis):
                reason = f"input {name!r} is the same all along its axis {axis}, as is an output"
                bug = "which positions the port mixes, and how"
                doubts.append(doubt("positions", bug, reason, DRAWN))
    return Findings(doubts=tuple(doubts))


def _joins(prepared: Prepared, name: str, x: np.ndarray, axis: int) -> bool:
    """Return whether the first position changes others of an output that is the same along axis."""
    moved = np.moveaxis(x.copy(), axis, 0)
    moved[0] = np.random.default_rng(prepared.seed).standard_normal(moved[0].shape)
    run = run_planted(with_inputs(prepared.reference, {name: np.moveaxis(moved, 0, axis)}))
    if run is None:
        return False
    for output, want in prepared.exact.kinds["output"].items():
        got = run.kinds["output"][output]
        if got.shape != want.shape or want.shape[axis : axis + 1] != moved.shape[:1]:
            continue
        got, want = np.moveaxis(got, axis, 0), np.moveaxis(want, axis, 0)
        if same(want, want[:1]) and not same(got[1:], want[1:]):
            return True
    return False


# --- two equal inputs -----------------------------------------------------------------------------


def try_equal_inputs(prepared: Prepared) -> Findings:
    """Doubt two equal inputs if the reference distinguishes them."""
    doubts = []
    for (a, given), (b, other) in combinations(prepared.inputs.by_name.items(), 2):
        if not _are_one(given, other) or (is_float(given.dtype) and prepared.gradients):
            continue  # gradients distinguish two floating inputs
        if _tells_apart(prepared, a, b, np.roll(given, 1, np.argmax(given.shape))):
            remedy = "arrays that differ"
            remedy += ", or gradients=True" if is_float(given.dtype) else ""
            bug = f"that inputs {a!r} and {b!r} are swapped"
            doubts.append(doubt("swapped-inputs", bug, "they are the same array", remedy))
    return Findings(doubts=tuple(doubts))


def _are_one(a: np.ndarray, b: np.ndarray) -> bool:
    """Return whether two inputs are equal and not constant; other canaries try constant ones."""
    return a.dtype == b.dtype and np.array_equal(a, b) and a.size > 0 and (a != a.flat[0]).any()


def _tells_apart(prepared: Prepared, a: str, b: str, value: np.ndarray) -> bool:
    """Return whether a new value of either input fails outputs, and in a different way for each."""
    runs = [run_planted(with_inputs(prepared.reference, {name: value})) for name in (a, b)]
    if None in runs:
        return False
    first, second = (run.kinds["output"] for run in runs if run)
    moved = all(run and prepared.would_fail(run) for run in runs)
    return moved and any(not same(first[name], second[name]) for name in first)


# --- an axis of size one --------------------------------------------------------------------------


_ALONG = {
    0: ("a batch of one", "the rows of a batch", "rows"),
    1: ("one position", "positions", "positions"),
}


def try_batches(prepared: Prepared) -> Findings:
    """Note an axis of size one if the reference also accepts two rows and keeps them apart."""
    inputs = prepared.inputs.by_name
    notes = (
        f"every input has {one}, so a port that mixes {several} would pass; to show it, use "
        f"two {what} that differ"
        for axis, (one, several, what) in _ALONG.items()
        if inputs and all(a.shape[axis : axis + 1] == (1,) for a in inputs.values())
        if _keeps_apart(prepared, inputs, axis)
    )
    return Findings(notes=findings("one-row", notes))


def _keeps_apart(prepared: Prepared, inputs: Mapping[str, np.ndarray], axis: int) -> bool:
    two = {name: np.concatenate([a, np.flip(a)], axis) for name, a in inputs.items()}
    run = run_planted(with_inputs(prepared.reference, two))
    if run is None:
        return False
    first = (slice(None),) * axis + (slice(1),)
    return all(
        want.shape[axis : axis + 1] == (1,)
        and got.shape == (*want.shape[:axis], 2, *want.shape[axis + 1 :])
        and same(got[first], want)
        for got, want in (
            (run.kinds["output"].get(name, want), want)
            for name, want in prepared.exact.kinds["output"].items()
        )
    )
