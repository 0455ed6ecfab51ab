"""Canaries of an axis of size one, batch or positions: it cannot show that a port mixes rows."""

from collections.abc import Mapping

import numpy as np

from jax_attn.parity.bugs.planting import run_planted
from jax_attn.parity.bugs.tensors import named_inputs, with_inputs
from jax_attn.parity.checking.canaries.findings import DoubtsAndNotes
from jax_attn.parity.checking.canaries.seen import same
from jax_attn.parity.checking.prepared import Prepared
from jax_attn.parity.judge.finding import findings
from jax_attn.parity.run.modes.float64_mode import Float64

_ALONG = {
    0: ("a batch of one", "the rows of a batch", "rows"),
    1: ("one position", "positions", "positions"),
}


def try_batches(prepared: Prepared) -> DoubtsAndNotes:
    """Note an axis of size one if the reference also accepts two rows and keeps them apart."""
    inputs = named_inputs(prepared.reference)
    notes = (
        f"every input has {one}, so a port that mixes {several} would pass; to show it, use "
        f"two {what} that differ"
        for axis, (one, several, what) in _ALONG.items()
        if inputs and all(a.shape[axis : axis + 1] == (1,) for a in inputs.values())
        if _keeps_apart(prepared, inputs, axis)
    )
    return DoubtsAndNotes((), findings("one-row", notes))


def _keeps_apart(prepared: Prepared, inputs: Mapping[str, np.ndarray], axis: int) -> bool:
    two = {name: np.concatenate([a, np.flip(a)], axis) for name, a in inputs.items()}
    run = run_planted(with_inputs(prepared.reference, two), Float64())
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
