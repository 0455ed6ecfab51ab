"""Canaries of masks with a pattern: the same along an axis, hiding only one end, or causal.

Also of other inputs that are the same along an axis, if no gradient shows which parts are read.
"""

from collections.abc import Iterable, Iterator

import numpy as np

from jax_attn.parity.bugs.bug import HIDES
from jax_attn.parity.bugs.tensors import with_inputs
from jax_attn.parity.checking.canaries.masks import is_mask, parameter_name
from jax_attn.parity.checking.canaries.seen import changes
from jax_attn.parity.checking.prepared import Prepared
from jax_attn.parity.judge.finding import Finding, Findings, StandingNote
from jax_attn.parity.run.inputs_and_runs import is_float, wide


def try_mask_patterns(prepared: Prepared) -> Findings:
    """Note simpler patterns that a port could read where the reference reads the whole input."""
    notes: list[Finding] = []
    for name, given in prepared.inputs.by_name.items():
        if given.size == 0 or (given == given.flat[0]).all():
            continue  # try_masks already doubts a mask of a single value
        alike = [axis for axis in range(given.ndim) if (given == given.take([0], axis)).all()]
        moved = np.roll(given, 1, max({*range(given.ndim)} - {*alike}))  # as many keys are hidden
        if is_mask(prepared.reference, name, given):
            notes += _of_axes(prepared, f"mask {name!r}", name, given, moved, alike)
            notes += [
                StandingNote(kind, f"mask {name!r} {words}")
                for kind, has, words in _ORDINARY
                if has(given) and _is_read(prepared, name, moved)
            ]
        elif is_float(given.dtype) and not prepared.gradients:  # gradients show what is read
            notes += _of_axes(prepared, f"input {name!r}", name, given, moved, alike)
            notes += _of_bias(prepared, name, given)
    return Findings(notes=tuple(notes))


def _of_axes(
    prepared: Prepared,
    label: str,
    name: str,
    given: np.ndarray,
    moved: np.ndarray,
    alike: Iterable[int],
) -> Iterator[Finding]:
    """Note the axes before the last along which a port could read one index for all."""
    for axis in alike:
        others = np.where(_is_first(given, axis), given, moved)
        several = given.shape[axis] > 1 and axis < given.ndim - 1
        if several and _is_read(prepared, name, others):
            yield Finding(
                "alike-along-axis",
                f"{label} is the same all along its axis {axis}, so a port that reads one index "
                f"there for all would pass; to show it, use one that differs along axis {axis}",
            )


def _of_bias(prepared: Prepared, name: str, bias: np.ndarray) -> Iterator[Finding]:
    """Note a bias that acts as a mask, with values of only 0 and a fill."""
    if "bias" not in parameter_name(prepared.reference, name).lower():
        return
    values = np.unique(wide({name: bias})[name])
    if len(values) != 2 or values[1] != 0 or values[0] > HIDES:
        return
    between = -np.linspace(0, 0.5, bias.size).reshape(bias.shape)
    if _is_read(prepared, name, np.where(bias == 0, between, bias)):
        yield Finding(
            "bias-as-mask",
            f"input {name!r} holds only 0 and {values[0]:g}, so a port that reads it as a mask, "
            "instead of adding it to the scores, would pass; to show it, use other numbers "
            "in it, or gradients=True",
        )


def _is_first(mask: np.ndarray, axis: int) -> np.ndarray:
    """Return an array, True at the first index of an axis, that broadcasts to the mask."""
    first = np.arange(mask.shape[axis]) == 0
    return first.reshape(-1, *[1] * (mask.ndim - 1 - axis))


def hides_one_end(mask: np.ndarray) -> bool:
    """Return whether a mask of texts, (B, S) or (B, 1, 1, S), hides tokens only at one end of each.

    Rows that each hide one key fewer than the row before belong to a causal mask, (T, S).
    """
    if mask.ndim < 2 or mask.shape[0] * mask.shape[-1] != mask.size:
        return False
    rows = mask.reshape(-1, mask.shape[-1])
    changes = (rows[:, 1:] != rows[:, :-1]).sum(-1)
    counts = (rows == rows[0, 0]).sum(-1)
    is_causal = len(rows) > 2 and (np.abs(np.diff(counts)) == 1).all()
    one_end = any((rows[:, end] == rows[0, end]).all() for end in (0, -1))
    return bool(one_end and (changes <= 1).all() and not is_causal)


def _is_causal(mask: np.ndarray) -> bool:
    """Return whether each query of a mask (..., T, S) sees the keys up to its own, counted from
    either end."""
    if mask.ndim < 2 or mask.shape[-2] == 1:
        return False
    T, S = mask.shape[-2:]
    shown = mask == mask.reshape(-1, T, S)[0, -1, 0]
    return any((shown == np.tri(T, S, offset, bool)).all() for offset in (0, S - T))


# Patterns of masks in ordinary calls, which are no reason to refuse a PASS.
_ORDINARY = (
    (
        "mask-one-end",
        hides_one_end,
        "hides tokens only at one end of each row, so a port that reads only how many it hides "
        "would pass; to show it, use a row in which a hidden token stands between two that "
        "are not",
    ),
    (
        "mask-causal",
        _is_causal,
        "is causal, so a port that is causal without reading it would pass; to show it, use a "
        "mask that hides other keys, too",
    ),
)


def _is_read(prepared: Prepared, name: str, other: np.ndarray) -> bool:
    """Return whether the reference accepts another value of an input and gives other outputs."""
    return changes(prepared, with_inputs(prepared.reference, {name: other}))
