"""Meaning of each array of an optax state, in the terms of `torch.optim`."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from flax import nnx
from jax.tree_util import keystr, tree_flatten_with_path

from jax_attn.transfer.problems import Problem

STEP = "step"  # of Adam: torch keeps one for each parameter
UPDATES = "updates"  # counted by schedules and wrappers: torch's optimizers keep no such count
PENDING = "pending"  # mini-steps since the last update: torch accumulates in the gradients
OWN = "own"  # kept unchanged
_INSIDE = "inside"  # other states
_NO_EQUAL = "no equal"

FIELDS = {
    "ScaleByAdamState": {"count": STEP, "mu": "exp_avg", "nu": "exp_avg_sq"},
    "TraceState": {"trace": "momentum_buffer"},
    "ScaleByScheduleState": {"count": UPDATES},
    "WrappedScheduleState": {"count": UPDATES},
    "WeightDecaySchedule": {"count": UPDATES},
    "InjectStatefulHyperparamsState": {
        "count": UPDATES,
        "hyperparams": OWN,
        "hyperparams_states": _INSIDE,
        "inner_state": _INSIDE,
    },
    "MaskedState": {"inner_state": _INSIDE},
    "PartitionState": {"inner_states": _INSIDE},
    "MultiStepsState": {
        "mini_step": PENDING,
        "gradient_step": UPDATES,
        "inner_opt_state": _INSIDE,
        "acc_grads": OWN,  # zero if no mini-step is pending
        "skip_state": OWN,
    },
    "ApplyIfFiniteState": {
        "notfinite_count": OWN,
        "last_finite": OWN,
        "total_notfinite": OWN,
        "inner_state": _INSIDE,
    },
    "NNXOptimizer": {"opt_state": _INSIDE, "step": UPDATES},
}
"""Fields of each state, by the name of its class, because optax does not export all classes."""

_WHY_NOT = {
    "ScaleByAmsgradState": "optax keeps the largest of the corrected second moments, torch the "
    "largest of the uncorrected ones",
}


class NNXOptimizer(NamedTuple):
    """Contents of an nnx.Optimizer as one more state."""

    opt_state: Any
    step: Any


class Slot(NamedTuple):
    """One array of an optax state.

    role: "exp_avg", "exp_avg_sq" or "momentum_buffer", torch's names of the moments; or STEP,
        UPDATES, PENDING, OWN.
    where: its place in the state, "1.0.mu.q_proj.kernel".
    path: a moment's place among the parameters, "q_proj.kernel".
    leaf: the array, or the nnx.Variable that holds it.
    """

    role: str
    where: str
    path: str
    leaf: Any

    @property
    def array(self) -> Any:
        return self.leaf.get_value() if isinstance(self.leaf, nnx.Variable) else self.leaf


def slots(state: Any) -> tuple[list[Slot], list[Problem]]:
    """Return every array of an optax state, in the order of its leaves, and the problems.

    Each state without a counterpart in torch is a problem.
    """
    owned = list(_slots(state, _INSIDE, "", "a bare array"))
    refusals: dict[str, str] = {}
    for slot, owner in owned:
        if slot.role in (_INSIDE, _NO_EQUAL):
            refusals.setdefault(owner, slot.where)
    known = ", ".join(name for name in FIELDS if name != "NNXOptimizer")
    problems = []
    for owner, where in refusals.items():
        text = f"expected a state with a counterpart in torch, got {owner}"
        hint = "" if owner in _WHY_NOT else f"known: {known}"
        problems.append(Problem("refused", where, _WHY_NOT.get(owner, text), hint))
    return [slot for slot, _ in owned], problems


def _slots(tree: Any, role: str, above: str, owner: str) -> Iterator[tuple[Slot, str]]:
    for keys, child in tree_flatten_with_path(tree, is_leaf=_is_unit)[0]:
        path = keystr(keys, simple=True, separator=".")
        where = ".".join(filter(None, (above, path)))
        if not _is_state(child):
            yield Slot(role, where, path, child), owner
            continue
        name = type(child).__name__
        roles = FIELDS.get(name, {})
        for field in child._fields:
            place = ".".join(filter(None, (where, field)))
            yield from _slots(getattr(child, field), roles.get(field, _NO_EQUAL), place, name)


def _is_unit(node: Any) -> bool:
    return _is_state(node) or isinstance(node, nnx.Variable)


def _is_state(node: Any) -> bool:
    return isinstance(node, tuple) and hasattr(node, "_fields")
