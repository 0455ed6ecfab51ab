"""Integer inputs that a port could ignore unseen: positions in order, token types all alike.

With such an input, a port that never reads it gives the right numbers. The reference therefore
runs forward once more with other values of it; `checking.other_inputs` runs the port on them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from jax_attn.parity.bugs.planting import run_planted
from jax_attn.parity.bugs.tensors import with_inputs
from jax_attn.parity.checking.canaries.masks import hidden_keys, is_mask
from jax_attn.parity.checking.other_inputs import OtherIntegers, not_checked
from jax_attn.parity.checking.prepared import Prepared
from jax_attn.parity.judge.finding import findings
from jax_attn.parity.run.inputs_and_runs import Inputs
from jax_attn.parity.run.reference import Reference

Arrays = Mapping[str, np.ndarray]
# An ignored input is a gross error: a quarter of the runs shows it, despite their wider budget.
RUNS = 4


def other_integers(prepared: Prepared) -> OtherIntegers:
    """Vary each integer input that a port could do without."""
    varied: dict[str, np.ndarray] = {}
    unvaried = []
    for name, given in prepared.inputs.by_name.items():
        if given.dtype.kind not in "iu" or is_mask(prepared.reference, name, given):
            continue
        other = _other_value(prepared, name, given)
        if isinstance(other, np.ndarray):
            varied[name] = other
        elif other:
            unvaried.append(f"whether the port reads input {name!r} was not checked: {other}")
    notes = findings("input-not-varied", unvaried)
    if not varied:
        return OtherIntegers(notes)
    together = with_inputs(prepared.reference, varied)
    if run_planted(together) is None:
        why = "the reference raises an error if all have other values"
        return OtherIntegers((*notes, not_checked(varied, why)))
    each = {
        name: _on(prepared, with_inputs(prepared.reference, {name: value}))
        for name, value in varied.items()
    }
    return OtherIntegers(notes, _on(prepared, together), each)


def integers_left_out(prepared: Prepared) -> tuple[str, ...]:
    """Return the integer inputs that the reference does not need, such as positions and types."""
    reference, given = prepared.reference, prepared.inputs
    without = {
        name: Inputs(given.args, {k: x for k, x in given.kwargs.items() if k != name})
        for name, a in given.kwargs.items()
        if a.dtype.kind in "iu" and not is_mask(reference, name, a)
    }
    runs = ((name, run_planted(reference.given(x))) for name, x in without.items())
    return tuple(name for name, run in runs if run is not None)


def _on(prepared: Prepared, reference: Reference) -> Prepared:
    # Perturbed runs keep the reference's decisions about constants, so record them on these inputs.
    # Made of the first, because only that has an `again`, with both budgets.
    anew = reference.deciding_anew()
    return replace(prepared.first, reference=anew, gradients=False, runs=RUNS)


# --- other values ---------------------------------------------------------------------------------


def _other_value(prepared: Prepared, name: str, given: np.ndarray) -> np.ndarray | str:
    """Return a value that changes the reference's outputs, else the text of a note, or ""."""
    accepted = unmasked = False
    for value in _candidates(given, np.random.default_rng(prepared.seed)):
        reference = with_inputs(prepared.reference, {name: value})
        run = run_planted(reference)
        if run is None or not _finite_as(run.kinds["output"], prepared.exact.kinds["output"]):
            continue
        accepted = True
        if not prepared.would_fail(run):
            continue
        # The reference may read positions out of order as the start of another sequence, which a
        # port that only uses positions rightly ignores.
        if not _in_order(given) or hidden_keys(reference) == hidden_keys(prepared.reference):
            return value
        unmasked = True
    if unmasked:
        return (
            "in another order its values also change which keys the reference hides; to show "
            "it, use positions with gaps"
        )
    return "other values change no output of the reference" if accepted else ""


def _candidates(given: np.ndarray, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Yield other values of an integer input that is constant, equal in each row, or counts up."""
    if given.size == 0:
        return
    first = int(given.flat[0])
    if (given == first).all():
        for other in [o for o in (1 - first, first - 1, first + 1) if o >= 0 or first < 0]:
            some = rng.random(given.shape) < 0.5
            some.flat[int(rng.integers(given.size))] = True
            yield np.where(some, other, given)
        return
    if _in_order(given):
        rows = np.arange(given[..., 0].size).reshape(given.shape[:-1])[..., None]
        yield given + 1 + rows
        yield given + 1
    if _in_order(given) or _rows_alike(given):
        yield rng.permuted(given, axis=-1)


def _in_order(given: np.ndarray) -> bool:
    """Return whether an input counts up along its last axis, as positions do."""
    return given.ndim > 0 and given.shape[-1] > 1 and bool((np.diff(given, axis=-1) == 1).all())


def _rows_alike(given: np.ndarray) -> bool:
    """Return whether an input is the same along some axis before the last."""
    axes = [axis for axis in range(given.ndim - 1) if given.shape[axis] > 1]
    return any((given == given.take([0], axis)).all() for axis in axes)


def _finite_as(got: Arrays, want: Arrays) -> bool:
    """Return whether outputs keep their shapes and are finite in the same places."""
    return all(
        got[name].shape == a.shape and (np.isfinite(got[name]) == np.isfinite(a)).all()
        for name, a in want.items()
    )
