"""Conversion of optimizer state: torch.optim's Adam, AdamW and SGD <-> optax, bit for bit.

    exp_avg          <-> mu       of optax's ScaleByAdamState
    exp_avg_sq       <-> nu
    step             <-> count
    momentum_buffer  <-> trace    of its TraceState

Moments have the axes of their parameter, and a table's steps only rearrange numbers, so the row for
a parameter also converts its moments. torch's first momentum buffer is the gradient itself, optax's
is the gradient added to a trace of zeros: they are equal without dampening.

The updates that follow are optax's: it computes 1 - b2ᵗ in float32, torch in float64, so at torch's
default b2 = 0.999 an update of Adam is smaller by a relative 1e-5 at most.
"""

import copy
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from flax import nnx

from jax_attn.transfer.arrays import Tensors, as_numpy, as_torch, why_unreadable
from jax_attn.transfer.nnx.load import check_layout, plan
from jax_attn.transfer.nnx.placement import place
from jax_attn.transfer.optimizer.optax_state import (
    OWN,
    PENDING,
    STEP,
    UPDATES,
    NNXOptimizer,
    Slot,
    slots,
)
from jax_attn.transfer.optimizer.torch_state import COUNTABLE, Names, moments, parameters
from jax_attn.transfer.problems import Problem, TransferError
from jax_attn.transfer.table.layout import Layout

OptState = TypeVar("OptState")

_MOMENTS = {"exp_avg": "mu", "exp_avg_sq": "nu", "momentum_buffer": "trace"}
"""torch's names of a parameter's moments -> optax's."""

_HINTS = {
    "missing": "torch keeps nothing for a parameter that had no gradient yet",
    "wrong dtype": "build the optimizer on parameters of that dtype, without mu_dtype or "
    "accumulator_dtype, or cast the tensors",
}


def load_optimizer(
    opt_state: OptState,
    torch_state: Mapping[str, Any],
    layout: Layout,
    names: Names | None = None,
    *,
    step: int | None = None,
) -> OptState:
    """Convert a `torch.optim` state to optax, so that training can continue there.

    Every count becomes `step`: Adam's, each schedule's and each wrapper's. Hyper-parameters are not
    converted: give both optimizers the same ones. The arrays are copies, each with the sharding of
    the one that it replaces.

    Args:
      opt_state: the result of `tx.init(nnx.state(module, nnx.Param))`, or `jax.eval_shape` of it: a
        filled copy is returned. Or an nnx.Optimizer, which is written into and returned. Moments
        may be inside chains, masks, partitions, injected hyper-parameters, MultiSteps and
        apply_if_finite.
      torch_state: `torch_optimizer.state_dict()`, of torch or NumPy tensors.
      layout: the table of the weights.
      names: the torch keys of the parameters, in the order in which the optimizer received them;
        for several groups, a list of such lists. None reads the state's param_names.
      step: the number of updates so far. It is needed if optax counts and torch does not, for
        example for SGD with a schedule.

    Raises:
      TransferError: lists every problem. An nnx.Optimizer is then unchanged.
    """
    if step is not None and not (isinstance(step, int) and 0 <= step < COUNTABLE):
        raise ValueError(f"step: expected an int from 0 to 2³¹ - 1, got {step!r}")
    both = _States(opt_state, torch_state, layout, names, read=False)
    values: dict[str, np.ndarray] = {}
    if both.comparable:
        tensors, steps = moments(torch_state["state"], both.parameters, both.problems)
        for moment in _MOMENTS:
            values |= both.to_flax(moment, tensors.get(moment, {}))
        values |= both.counts(steps, step)
    if both.problems:
        raise TransferError("loading an optimizer's state, nothing written", both.problems)
    placed = {s.where: place(values[s.where], s.array) for s in both.slots if s.where in values}
    if isinstance(opt_state, nnx.Optimizer):
        for slot in both.slots:
            if slot.where in placed:
                slot.leaf.set_value(placed[slot.where])
        return opt_state
    leaves = [placed.get(slot.where, slot.array) for slot in both.slots]
    return jax.tree.unflatten(jax.tree.structure(opt_state), leaves)


def export_optimizer(
    opt_state: Any, torch_state: Mapping[str, Any], layout: Layout, names: Names | None = None
) -> dict[str, Any]:
    """Convert an optax state to `torch.optim`: the inverse of `load_optimizer`.

    Args:
      opt_state: as for `load_optimizer`.
      torch_state: the `state_dict()` of the torch optimizer that continues, new or not: its
        param_groups are copied, its state is not read.
      layout: as for `load_optimizer`.
      names: as for `load_optimizer`.

    Returns:
      A state for `torch_optimizer.load_state_dict`: copies, as torch tensors if torch is imported,
      otherwise as NumPy arrays.

    Raises:
      TransferError: every problem.
    """
    both = _States(opt_state, torch_state, layout, names, read=True)
    values: dict[str, Mapping[str, Any]] = {}
    if both.comparable:
        values["step"] = dict.fromkeys((p.key for p in both.parameters), both.step())
        values |= {moment: both.to_torch(moment) for moment in _MOMENTS}
    if both.problems:
        raise TransferError("exporting an optimizer's state", both.problems)
    state = {
        p.id: {name: as_torch(np.array(values[name][p.key], order="C")) for name in p.kept}
        for p in both.parameters
        if p.kept
    }
    return {"state": state, "param_groups": copy.deepcopy(torch_state["param_groups"])}


class _States:
    """Both optimizers' states, and the problems of converting one to the other.

    read: whether the values of the optax state are needed, or only the shapes and dtypes.
    """

    def __init__(
        self, opt_state: Any, torch_state: Any, layout: Layout, names: Names | None, *, read: bool
    ) -> None:
        check_layout(layout)
        if isinstance(opt_state, nnx.Optimizer):
            opt_state = NNXOptimizer(opt_state.opt_state, opt_state.step)
        self.layout = layout
        self.slots, self.problems = slots(opt_state)
        for slot in self.slots:
            if reason := _why_not(slot, read):
                self.problems.append(Problem("unreadable", slot.where, reason))
            elif slot.role == PENDING and (count := int(as_numpy(slot.array, slot.where))):
                text = f"expected no accumulated gradient, got {count} mini-steps of it"
                hint = "continue to the next update, then convert it"
                self.problems.append(Problem("refused", slot.where, text, hint))
        for moment in _MOMENTS:
            for path, count in Counter(slot.path for slot in self._of(moment)).items():
                if count > 1:
                    text = f"expected one {moment}, got {count}"
                    self.problems.append(Problem("ambiguous", path, text))
        self.parameters = parameters(torch_state, names, self.problems)

    @property
    def comparable(self) -> bool:
        """True if both can be read; otherwise everything in one would be missing in the other."""
        unreadable = any(problem.kind == "unreadable" for problem in self.problems)
        return bool(self.parameters or not self.problems) and not unreadable

    def to_flax(self, moment: str, tensors: Tensors) -> dict[str, np.ndarray]:
        """Return one moment of every parameter, by its place in the optax state."""
        places = {slot.path: slot for slot in self._of(moment)}
        if self._lacks(moment, len(tensors), len(places)):
            return {}
        arrays = {path: slot.array for path, slot in places.items()}
        if problems := plan(nnx.State(arrays), tensors, self.layout).problems:
            self._refuse(moment, problems)
            return {}
        shapes = {path: array.shape for path, array in arrays.items()}
        moved = self.layout.to_flax(tensors, shapes)
        return {places[path].where: array for path, array in moved.items()}

    def to_torch(self, moment: str) -> dict[str, np.ndarray]:
        """Return one moment of every parameter, by torch key."""
        arrays = {slot.path: slot.array for slot in self._of(moment)}
        expected = [parameter.key for parameter in self.parameters if moment in parameter.kept]
        if self._lacks(moment, len(expected), len(arrays)):
            return {}
        try:
            keys = [parameter.key for parameter in self.parameters]
            tensors = self.layout.spelled_as(keys).to_torch(arrays)
        except TransferError as error:
            self._refuse(moment, error.problems)
            return {}
        text = f"the optax state has no {_MOMENTS[moment]} for it"
        absent = [("missing", key, text) for key in expected if key not in tensors]
        text = "torch keeps no such moment for it"
        absent += [("unexpected", key, text) for key in tensors if key not in expected]
        self.problems += [Problem(kind, f"{moment} of {key}", text) for kind, key, text in absent]
        return tensors

    def counts(self, steps: Mapping[int, str], argument: int | None) -> dict[str, np.ndarray]:
        """Return the step for every count, by its place in the optax state."""
        counters = self._of(STEP, UPDATES)
        sources = {**steps, **({argument: "step="} if argument is not None else {})}
        if len(sources) > 1:
            text = "expected one for all parameters, because optax has one count, got "
            text += ", ".join(f"{step} ({source})" for step, source in sources.items())
            self.problems.append(Problem("ambiguous", "step", text))
        elif counters and not sources:
            text = f"optax counts updates in {counters[0].where}, but torch's state has no count"
            hint = "pass step=, the number of updates so far"
            self.problems.append(Problem("missing", "step", text, hint))
        return {c.where: np.array(step, c.array.dtype) for c in counters for step in sources}

    def step(self) -> np.float32 | None:
        """Return Adam's count as torch keeps it, one float32; None if optax has no usable one."""
        counts = {int(as_numpy(slot.array)): slot.where for slot in self._of(STEP)}
        if len(counts) > 1:
            text = ", ".join(f"{count} ({where})" for count, where in counts.items())
            text = f"expected one count of updates, got {text}"
            self.problems.append(Problem("ambiguous", "step", text))
        elif counts:
            ((count, where),) = counts.items()
            if int(np.float32(count)) == count:
                return np.float32(count)
            text = f"expected a count that is exact in torch's float32, got {count}"
            self.problems.append(Problem("refused", where, text))
        return None

    def _of(self, *roles: str) -> list[Slot]:
        return [slot for slot in self.slots if slot.role in roles]

    def _lacks(self, moment: str, in_torch: int, in_optax: int) -> bool:
        """Return whether a side lacks the moment; report a problem if the other has it."""
        if in_torch and in_optax:
            return False
        if in_torch != in_optax:
            text = f"torch has it for {in_torch} parameters, optax has {in_optax} arrays of "
            text += f"{_MOMENTS[moment]}"
            self.problems.append(Problem("unexpected" if in_torch else "missing", moment, text))
        return True

    def _refuse(self, moment: str, problems: Iterable[Problem]) -> None:
        keys = {parameter.key for parameter in self.parameters}
        for p in problems:
            hint = _HINTS.get(p.kind, p.hint) if p.name in keys else p.hint
            self.problems.append(p._replace(name=f"{moment} of {p.name}", hint=hint))


def _why_not(slot: Slot, read: bool) -> str:
    abstract = isinstance(slot.array, jax.ShapeDtypeStruct)
    if slot.role == OWN:
        return "expected a value, because torch has none for it, got a shape" if abstract else ""
    return "" if abstract and slot.role != PENDING and not read else why_unreadable(slot.array)
