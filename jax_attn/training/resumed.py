"""The state from which a training goes on: torch's optimizer's, and the port's beside it."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from jax_attn.parity.judge.finding import Finding, findings
from jax_attn.training.optimizers.schedules import steps_made
from jax_attn.training.reference_training import ReferenceTraining
from jax_attn.training.runs import Arrays
from jax_attn.transfer import TransferError, as_numpy
from jax_attn.transfer.optimizer.carry import load_optimizer
from jax_attn.transfer.optimizer.optax_state import PENDING, STEP, UPDATES, slots

_COUNTS = (STEP, UPDATES, PENDING)
_MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")


@dataclass(frozen=True)
class Resumed:
    """The state of the port's optimizer before the first update.

    Attributes:
      arrays: place in the state, such as "0.mu.kernel", -> array; None if the state is new.
      differences: a sentence on each array that is not torch's.
      notes: why the two states were not compared, if they were not.
    """

    arrays: Arrays | None = None
    differences: tuple[Finding, ...] = ()
    notes: tuple[Finding, ...] = ()


def resumed(
    reference: ReferenceTraining,
    tx: optax.GradientTransformation,
    start: Mapping[str, jax.Array],
    port_state: Any,
) -> Resumed:
    """Return the state that the port goes on from: `port_state`, or torch's own, carried over.

    start: the port's parameters, by path. Raises ValueError if there is no such state.
    """
    loop = reference.loop
    module = copy.deepcopy(loop.module)
    optimizer = loop.recipe.optimizer(module)
    kept = {
        name for state in optimizer.state.values() for name, x in state.items() if x is not None
    }
    done = max((int(s.get("step", 0)) for s in optimizer.state.values()), default=0)
    scheduled = steps_made(loop.recipe.schedule(optimizer)) if loop.recipe.schedule else None
    if "step" in kept and scheduled not in (None, done):
        raise ValueError(
            f"schedule: expected a scheduler that has made the optimizer's {done} steps, got one "
            f"that has made {scheduled}"
        )
    is_begun = bool(done or scheduled or (kept and "step" not in kept))
    new = tx.init(dict(start))
    if port_state is None and not is_begun:
        return Resumed()
    key = {id(p): name for name, p in module.named_parameters()}
    names = [[key[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    step = None if "step" in kept else scheduled or 0
    try:
        layout = loop.to_paths.layout
        carried = (
            load_optimizer(new, optimizer.state_dict(), layout, names, step=step)
            if is_begun
            else new
        )
    except TransferError as error:
        if port_state is None:
            raise ValueError(
                f"optimizer: its state does not go over to the port's, so pass port_state=; {error}"
            ) from error
        reasons = "; ".join(f"{p.name}: {p.text}" for p in error.problems[:3])
        note = f"the two optimizers' states at the start were not compared: {reasons}"
        return Resumed(_given(new, port_state), notes=(Finding("moment-not-compared", note),))
    wanted = {slot.where: slot for slot in slots(carried)[0]}
    arrays = {where: as_numpy(slot.array, where) for where, slot in wanted.items()}
    if port_state is None:
        return Resumed(arrays)
    given = _given(new, port_state)
    is_counted = scheduled is not None or type(optimizer).__name__ != "SGD"  # which keeps no count
    compared = (*_MOMENTS, *_COUNTS) if is_counted else _MOMENTS
    differences = (
        _difference(where, given[where], a, wanted[where].role in _COUNTS)
        for where, a in arrays.items()
        if wanted[where].role in compared and not np.array_equal(given[where], a)
    )
    return Resumed(given, findings("optimizer-state-differs", differences))


def _given(new: Any, port_state: Any) -> dict[str, np.ndarray]:
    """Return the arrays of the user's state by place. Raises ValueError if it is another's."""
    state = port_state.opt_state if isinstance(port_state, nnx.Optimizer) else port_state
    given = {slot.where: as_numpy(slot.array, slot.where) for slot in slots(state)[0]}
    expected = {slot.where: tuple(slot.array.shape) for slot in slots(new)[0]}
    got = {where: a.shape for where, a in given.items()}
    if got != expected:
        unlike = sorted(
            where for where in {*expected, *got} if expected.get(where) != got.get(where)
        )
        raise ValueError(
            "port_state: expected a state of the port's optimizer, over the port's parameters: at "
            f"{unlike[0]!r} it has {expected.get(unlike[0], 'nothing')}, this one "
            f"{got.get(unlike[0], 'nothing')}; {len(unlike)} places differ"
        )
    return given


def _difference(where: str, got: np.ndarray, want: np.ndarray, is_count: bool) -> str:
    if is_count:
        return f"optimizer state: the port's {where} is {got}, and torch has made {want} updates"
    most = float(np.abs(np.float64(got) - np.float64(want)).max(initial=0.0))
    return f"optimizer state: the port's {where} differs from torch's by up to {most:.3g}"
