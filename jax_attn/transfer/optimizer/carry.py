"""Optimizer state through a table: torch.optim's Adam, AdamW and SGD <-> optax, bit for bit.

    exp_avg          <-> mu       of optax's ScaleByAdamState
    exp_avg_sq       <-> nu
    step             <-> count
    momentum_buffer  <-> trace    of its TraceState

Moments have the axes of their parameter, and a table's steps only rearrange numbers: the row that
carries a parameter carries its moments. torch's first momentum buffer is the gradient itself,
optax's is the gradient added to a trace of zeros: they are equal unless something dampens them.

The updates that follow are optax's: it computes 1 - b2ᵗ in float32 where torch does so in float64,
so that at torch's default b2 = 0.999 an update of Adam is up to 1e-5 of itself smaller.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from flax import nnx

from jax_attn.transfer.arrays import Tensors, as_numpy, why_unreadable
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
from jax_attn.transfer.optimizer.torch_state import (
    COUNTABLE,
    Names,
    Parameter,
    as_torch,
    moments,
    parameters,
)
from jax_attn.transfer.problems import Problem, TransferError
from jax_attn.transfer.table.layout import Layout

OptState = TypeVar("OptState")

_MOMENTS = {"exp_avg": "mu", "exp_avg_sq": "nu", "momentum_buffer": "trace"}
"""torch's names of a parameter's moments, and optax's."""

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
    """Carry a `torch.optim` state over into optax, so that the training run continues there.

    opt_state: what `tx.init(nnx.state(module, nnx.Param))` returns, or jax.eval_shape of it: a
        filled copy is returned; or an nnx.Optimizer, which is written into and returned. Moments
        may be inside chains, masks, partitions, injected hyper-parameters, MultiSteps and
        apply_if_finite.
    torch_state: `torch_optimizer.state_dict()`, of torch or NumPy tensors.
    layout: the table that carries the weights.
    names: the torch keys of the parameters in the order in which the optimizer received them;
        a list of such lists where it has several groups; None reads the state's param_names.
    step: the number of updates so far: needed where optax counts and torch does not, as for SGD
        under a schedule.

    Every count becomes the step: Adam's, each schedule's, each wrapper's. Hyper-parameters are
    not carried: the caller makes both optimizers' alike. Arrays are copies, each with the sharding
    of the one it replaces. Raises TransferError with every problem; an nnx.Optimizer is then as it
    was.
    """
    _check_arguments(layout, step)
    held, problems = _slots(opt_state, read=False)
    known, refusals = parameters(torch_state, names)
    problems += refusals
    values: dict[str, np.ndarray] = {}
    if _comparable(known, problems):
        tensors, steps, more = moments(torch_state["state"], known)
        problems += more
        for moment, field in _MOMENTS.items():
            arrays, more = _to_flax(moment, field, tensors.get(moment, {}), held, known, layout)
            values |= arrays
            problems += more
        counts, more = _counts(held, steps, step)
        values |= counts
        problems += more
    if problems:
        raise TransferError("loading an optimizer's state, nothing written", problems)
    placed = {
        slot.where: place(values[slot.where], slot.array) for slot in held if slot.where in values
    }
    if isinstance(opt_state, nnx.Optimizer):
        for slot in held:
            if slot.where in placed:
                slot.leaf.set_value(placed[slot.where])
        return opt_state
    leaves = [placed.get(slot.where, slot.array) for slot in held]
    return jax.tree.unflatten(jax.tree.structure(opt_state), leaves)


def export_optimizer(
    opt_state: Any, torch_state: Mapping[str, Any], layout: Layout, names: Names | None = None
) -> dict[str, Any]:
    """Carry an optax state over into `torch.optim`: the inverse of `load_optimizer`.

    torch_state: the `state_dict()` of the torch optimizer that continues, new or not: its
        param_groups are copied, its state is not read. Other arguments: see `load_optimizer`.
    Returns what `torch_optimizer.load_state_dict` takes: torch tensors where torch is imported,
    NumPy arrays where it is not, copies in any case. Raises TransferError with every problem.
    """
    _check_arguments(layout, None)
    held, problems = _slots(opt_state, read=True)
    known, refusals = parameters(torch_state, names)
    problems += refusals
    values: dict[str, dict[str, Any]] = {}
    if _comparable(known, problems):
        step, more = _step(held)
        values["step"] = {parameter.key: step for parameter in known}
        problems += more
        for moment, field in _MOMENTS.items():
            values[moment], more = _to_torch(moment, field, held, known, layout)
            problems += more
    if problems:
        raise TransferError("exporting an optimizer's state", problems)
    state = {
        p.id: {name: as_torch(np.array(values[name][p.key], order="C")) for name in p.kept}
        for p in known
        if p.kept
    }
    return {"state": state, "param_groups": copy.deepcopy(torch_state["param_groups"])}


def _slots(opt_state: Any, *, read: bool) -> tuple[list[Slot], list[Problem]]:
    """Every array of the state, and the problems of optax's side alone.

    read: whether the values are needed, or only the shapes and dtypes.
    """
    if isinstance(opt_state, nnx.Optimizer):
        opt_state = NNXOptimizer(opt_state.opt_state, opt_state.step)
    held, problems = slots(opt_state)
    for slot in held:
        if reason := _why_not(slot, read):
            problems.append(Problem("unreadable", slot.where, reason))
        elif slot.role == PENDING and (count := int(as_numpy(slot.array, slot.where))):
            text = f"expected no accumulated gradient, got {count} mini-steps of it"
            hint = "go on to the next update, then carry it over"
            problems.append(Problem("refused", slot.where, text, hint))
    for moment in _MOMENTS:
        paths = [slot.path for slot in held if slot.role == moment]
        problems += [
            Problem("ambiguous", path, f"expected one {moment}, got {paths.count(path)}")
            for path in dict.fromkeys(paths)
            if paths.count(path) > 1
        ]
    return held, problems


def _comparable(known: Sequence[Parameter], problems: Sequence[Problem]) -> bool:
    """Whether both sides can be read: otherwise everything of one would be missing on the other."""
    unreadable = any(problem.kind == "unreadable" for problem in problems)
    return bool(known or not problems) and not unreadable


def _why_not(slot: Slot, read: bool) -> str:
    abstract = isinstance(slot.array, jax.ShapeDtypeStruct)
    if slot.role == OWN:
        return "expected its value, as torch has none for it, got a shape" if abstract else ""
    return "" if abstract and slot.role != PENDING and not read else why_unreadable(slot.array)


def _to_flax(
    moment: str,
    field: str,
    tensors: Tensors,
    held: Sequence[Slot],
    known: Sequence[Parameter],
    layout: Layout,
) -> tuple[dict[str, np.ndarray], list[Problem]]:
    """One moment of every parameter, by its place in the optax state."""
    places = {slot.path: slot for slot in held if slot.role == moment}
    if not tensors or not places:
        return {}, _one_sided(moment, field, len(tensors), len(places))
    arrays = {path: slot.array for path, slot in places.items()}
    if problems := plan(nnx.State(arrays), tensors, layout).problems:
        return {}, [_of_moment(moment, problem, known) for problem in problems]
    moved = layout.to_flax(tensors, {path: array.shape for path, array in arrays.items()})
    return {places[path].where: array for path, array in moved.items()}, []


def _to_torch(
    moment: str, field: str, held: Sequence[Slot], known: Sequence[Parameter], layout: Layout
) -> tuple[dict[str, np.ndarray], list[Problem]]:
    """One moment of every parameter, by torch key."""
    arrays = {slot.path: slot.array for slot in held if slot.role == moment}
    expected = [parameter.key for parameter in known if moment in parameter.kept]
    if not expected or not arrays:
        return {}, _one_sided(moment, field, len(expected), len(arrays))
    try:
        tensors = layout.to_torch(arrays)
    except TransferError as error:
        return {}, [_of_moment(moment, problem, known) for problem in error.problems]
    problems = [
        Problem("missing", f"{moment} of {key}", f"no {field} of the optax state gives it")
        for key in expected
        if key not in tensors
    ]
    problems += [
        Problem("unexpected", f"{moment} of {key}", "torch keeps none under this name")
        for key in tensors
        if key not in expected
    ]
    return tensors, problems


def _one_sided(moment: str, field: str, in_torch: int, in_optax: int) -> list[Problem]:
    """A single problem where only one side has the moment."""
    if in_torch == in_optax:
        return []
    text = f"{in_torch} parameters have it in torch, {in_optax} arrays are {field} in optax"
    return [Problem("unexpected" if in_torch else "missing", moment, text)]


def _of_moment(moment: str, problem: Problem, known: Sequence[Parameter]) -> Problem:
    of_torch = problem.name in {parameter.key for parameter in known}
    hint = _HINTS.get(problem.kind, problem.hint) if of_torch else problem.hint
    return problem._replace(name=f"{moment} of {problem.name}", hint=hint)


def _counts(
    held: Sequence[Slot], steps: Mapping[int, str], argument: int | None
) -> tuple[dict[str, np.ndarray], list[Problem]]:
    """The step for every count, by its place in the optax state."""
    counters = [slot for slot in held if slot.role in (STEP, UPDATES)]
    sources = {**steps, **({argument: "step="} if argument is not None else {})}
    if len(sources) > 1:
        text = ", ".join(f"{step} ({source})" for step, source in sources.items())
        text = f"expected one for all parameters, as optax counts once, got {text}"
        return {}, [Problem("ambiguous", "step", text)]
    if counters and not sources:
        text = f"optax counts updates in {counters[0].where}, torch's state does not tell them"
        return {}, [Problem("missing", "step", text, "hand in step=, the number of updates made")]
    counts = {slot.where: np.array(step, slot.array.dtype) for slot in counters for step in sources}
    return counts, []


def _step(held: Sequence[Slot]) -> tuple[np.float32 | None, list[Problem]]:
    """Adam's count as torch keeps it: one float32."""
    counts = {int(as_numpy(slot.array)): slot.where for slot in held if slot.role == STEP}
    if len(counts) > 1:
        text = ", ".join(f"{count} ({where})" for count, where in counts.items())
        return None, [Problem("ambiguous", "step", f"expected one count of updates, got {text}")]
    if not counts:
        return None, []
    ((count, where),) = counts.items()
    if int(np.float32(count)) != count:
        text = f"expected a count that float32 holds, which torch counts in, got {count}"
        return None, [Problem("refused", where, text)]
    return np.float32(count), []


def _check_arguments(layout: Any, step: Any) -> None:
    check_layout(layout)
    if step is not None and not (isinstance(step, int) and 0 <= step < COUNTABLE):
        raise ValueError(f"step: expected an int from 0 to 2³¹ - 1, got {step!r}")
