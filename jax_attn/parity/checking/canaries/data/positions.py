"""Canaries of inputs that are the same along an axis, where mixed positions do not show."""

import numpy as np

from jax_attn.parity.bugs.planting import run_planted
from jax_attn.parity.bugs.softmax import DRAWN
from jax_attn.parity.bugs.tensors import named_inputs, with_inputs
from jax_attn.parity.checking.canaries.findings import DoubtsAndNotes, doubt
from jax_attn.parity.checking.canaries.seen import same
from jax_attn.parity.checking.prepared import Prepared
from jax_attn.parity.run.inputs_and_runs import is_float
from jax_attn.parity.run.modes.float64_mode import Float64


def try_positions(prepared: Prepared) -> DoubtsAndNotes:
    """Doubt inputs that are the same along an axis whose positions the reference mixes.

    This needs no softmax."""
    doubts = []
    for name, x in named_inputs(prepared.reference).items():
        for axis in range(x.ndim - 1) if is_float(x.dtype) else ():
            alike = x.shape[axis] > 1 and (x == x.take([0], axis)).all()
            if alike and _joins(prepared, name, x, axis):
                reason = f"input {name!r} is the same all along its axis {axis}, as is an output"
                bug = "which positions the port mixes, and how"
                doubts.append(doubt("positions", bug, reason, DRAWN))
    return DoubtsAndNotes(tuple(doubts), ())


def _joins(prepared: Prepared, name: str, x: np.ndarray, axis: int) -> bool:
    """Return whether the first position changes others of an output that is the same along axis."""
    moved = np.moveaxis(x.copy(), axis, 0)
    moved[0] = np.random.default_rng(prepared.seed).standard_normal(moved[0].shape)
    run = run_planted(
        with_inputs(prepared.reference, {name: np.moveaxis(moved, 0, axis)}), Float64()
    )
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
