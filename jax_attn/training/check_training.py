"""Check that a port trains as its reference does: gradients, updates, state, a free run.

Two runs of one training drift apart even if both are right, so a bound that grows with each step
says nothing after fifty steps. A free run is compared instead with the spread of a few float64
torch runs, in which every operation is perturbed at roundoff, the optimizer's operations included.
If that spread is too wide to tell a wrong run from a right one, the verdict is INCONCLUSIVE.

Data flows in one direction: arguments -> recipe -> the reference's runs (`ReferenceTraining`)
-> the port's runs (`PortLoop`) -> one report per tensor (`compare_…`) -> `Result`.
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import optax
import torch
from flax import nnx

from jax_attn.dtypes import DTYPES
from jax_attn.parity.checking.arguments import dtype_problems, type_problems, x64_problems
from jax_attn.parity.checking.canaries import DoubtsAndNotes
from jax_attn.parity.checking.weights import Weights, compare_weights
from jax_attn.parity.judge.compare import TensorReport, Verdict
from jax_attn.parity.judge.finding import Finding, findings
from jax_attn.parity.judge.result import Result
from jax_attn.parity.judge.text import joined
from jax_attn.parity.run.inputs_and_runs import is_float
from jax_attn.parity.run.port import full_precision, parameters
from jax_attn.training.canaries import try_canaries
from jax_attn.training.optimizers.optax_like import learning_rates, update_problems
from jax_attn.training.port_loop import PortLoop
from jax_attn.training.recipe import (
    LOSSES,
    TARGET,
    MakeOptimizer,
    MakeScheduler,
    Recipe,
    with_loss,
)
from jax_attn.training.reference_training import (
    ReferenceTraining,
    compare_free_run,
    compare_replay,
    missing_moments,
)
from jax_attn.training.runs import MOMENT_FIELDS, Replay
from jax_attn.transfer import Layout
from jax_attn.transfer.kinds.held import as_call, as_module

if TYPE_CHECKING:
    from jax_attn.parity.explaining.explanation import Explanation


def check_training(
    reference: torch.nn.Module,
    port: Any,
    batches: Sequence[Mapping[str, np.ndarray]],
    *,
    layout: Layout,
    optimizer: MakeOptimizer,
    loss: str | tuple[Callable[..., Any], Callable[..., Any]],
    steps: int = 10,
    schedule: MakeScheduler | None = None,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    accumulate: int = 1,
    accumulated: str = "sum",
    port_optimizer: optax.GradientTransformation | None = None,
    reference_call: Callable[..., Any] | None = None,
    port_call: Callable[..., Any] | None = None,
    dtype: str = "float32",
) -> Result:
    """Check that `port`, compiled and under optax, trains as `reference` does in eager torch.

    Each of these is judged separately, under the port's names: the gradients of the first batch;
    the parameters after one update and after three, from identical gradients (torch's own); the
    optimizer's state after these; and the loss and the parameters of a free run, at several steps.
    For a parameter, the distance that it moved is compared, since an update is small compared to
    the parameter itself. If these batches would not reveal that an option of the recipe is left
    out, the verdict is INCONCLUSIVE.

    Args:
      reference: the torch module, with its weights in place and in `dtype`. A copy is trained. In
        bfloat16 and float16 the weights are rounded copies of float32 masters; in both frameworks
        only the masters are updated, by gradients cast to float32.
      port: the NNX module, or a port of another kind, as for `check`; with the same weights and
        dtype. It is not changed.
      batches: dicts of NumPy arrays, all of the same shapes, taken in turn. "target" goes to the
        loss; the other arrays go by keyword to both modules, or to `reference_call` and
        `port_call`. A module that draws its own dropout is refused; pass its keep masks in each
        batch instead.
      layout: the transfer table between the two modules.
      optimizer: a function from a module to its `torch.optim` optimizer.
      loss: one of `LOSSES`, or a pair of functions (torch's, JAX's), each (output, target) ->
        scalar.
      steps: the number of updates of the free run. An update takes `accumulate` batches.
      schedule: a function from an optimizer to its scheduler, which is stepped after each update.
      clip_norm: as for `optax_like`.
      clip_value: as for `optax_like`.
      accumulate: as for `optax_like`.
      accumulated: as for `optax_like`.
      port_optimizer: the optax transformation to train with; the default is `optax_like` of the
        reference's optimizer. optax's own `adam` and `adamw` compute 1 - b**t in float32, with an
        error of about 1e-5 in the first updates. A difference that vanishes in float64 is a note
        that states the drift. `nadam` and `clip_by_global_norm` compute something else, and FAIL.
      reference_call: as for `check`.
      port_call: as for `check`.
      dtype: the dtype of both modules.

    Returns:
      The `Result`.

    Raises:
      TypeError, ValueError, TransferError: the training cannot be checked; the message lists every
        reason.
    """
    recipe = Recipe(optimizer, schedule, clip_norm, clip_value, accumulate, accumulated)
    if problems := _type_problems(reference, port, layout, recipe, port_optimizer):
        raise TypeError("\n".join(problems))
    port, port_call = as_module(port), as_call(port, port_call)
    _validate(reference, port, batches, recipe, loss, steps, dtype)
    torch_loss, jax_loss = LOSSES[loss] if isinstance(loss, str) else loss
    of_batch = with_loss(reference_call, torch_loss)
    training = ReferenceTraining.of(
        reference, batches, recipe, steps, of_batch, dtype, layout=layout, port=port
    )
    if problems := training.loop.problems():
        raise ValueError("\n".join(problems))
    tx = port_optimizer or training.optax_like(port)
    return judge(
        training,
        PortLoop(port, with_loss(port_call, jax_loss), batches, dtype),
        tx,
        try_canaries(training),
        failures=compare_weights(Weights.of(reference), port, layout).differences,
    )


def judge(
    reference: ReferenceTraining,
    port: PortLoop,
    tx: optax.GradientTransformation,
    canaries: DoubtsAndNotes,
    *,
    failures: Sequence[Finding] = (),
    notes: Sequence[Finding] = (),
    name: str = "training",
) -> Result:
    """Train the port by `tx`, and compare its updates, its state and its free run.

    Updates that fail are made again in float64. If they pass there, only the optimizer's rounding
    differs: those runs are reported, and a note gives the drift.

    canaries: those of the same reference. failures, notes: those known before the comparison.
    """
    loop = reference.loop
    gradients = [loop.to_paths(by_key) for by_key in reference.gradients]
    accumulate = loop.recipe.accumulate

    def reports(dtype: str | None = None) -> tuple[Replay, list[TensorReport], list[TensorReport]]:
        replay = port.replay(tx, gradients, accumulate, dtype=dtype)
        free_run = port.free_run(tx, reference.steps, accumulate, dtype=dtype)
        of_replay, of_free_run = (
            compare_replay(reference, replay),
            compare_free_run(reference, free_run),
        )
        return replay, list(of_replay), list(of_free_run)

    with full_precision() as (backend, pinned):
        replay, updates, free_run = reports()
        drift: tuple[Finding, ...] = ()
        if any(report.verdict is Verdict.FAIL for report in updates):
            graded = _graded(
                partial(reports, "float64"), partial(port.drift, tx, gradients, accumulate)
            )
            if graded is not None:
                updates, free_run, drift = graded
    return Result(
        dtype=loop.dtype,
        backend=backend,
        tensors=(*updates, *free_run),
        failures=(*failures, *missing_moments(reference, replay)),
        doubts=canaries.doubts,
        notes=(*notes, *drift, *_not_compared(reference), *pinned, *canaries.notes),
        name=name,
        details={"steps": str(reference.steps)},
        explainer=partial(_explained, reference, port, tx),
    )


_MOST_DRIFT = 2.0**-10
"""The largest share of an update that counts as rounding: what one rounding of float32 makes of
1 - b at b = 1 - 2**-14, which is closer to 1 than the decay of any published training."""


def _graded(
    reports: Callable[[], tuple[Replay, list[TensorReport], list[TensorReport]]],
    drift: Callable[[], dict[int, float]],
) -> tuple[list[TensorReport], list[TensorReport], tuple[Finding, ...]] | None:
    """Return the reports of runs whose optimizer computes in float64, with a note of the drift.

    None if they fail, too, if rounding moves the first update by more than `_MOST_DRIFT`, or if the
    optimizer computes only in its own dtype.
    """
    try:
        _, updates, free_run = reports()
        if any(report.verdict is Verdict.FAIL for report in updates):
            return None
        shares = {n: share for n, share in drift().items() if math.isfinite(share)}
    except Exception:  # the user's transformation may raise any error on another dtype
        return None
    return (updates, free_run, (_drift(shares),)) if shares.get(1, 1.0) <= _MOST_DRIFT else None


def _drift(shares: Mapping[int, float]) -> Finding:
    """Say that the optimizers differ by rounding alone, and how far that moves parameters."""
    told = joined([f"{share:.2g} after {n:,} updates" for n, share in shares.items()])
    return Finding(
        "optimizer-rounding",
        "port_optimizer: it makes torch's updates if it computes in float64, so it differs only by "
        "rounding in its own arithmetic. From the recorded gradients, repeated, rounding displaces "
        f"the parameters by {told.replace('1 updates', '1 update')}, as a share of the distance "
        "that they move; `parity.optax_like` rounds as torch does",
    )


def _explained(
    reference: ReferenceTraining, port: PortLoop, tx: optax.GradientTransformation, result: Result
) -> "Explanation":
    from jax_attn.training.explain import explain_training  # unused if the check passes

    return explain_training(result, reference, port, tx)


def _not_compared(reference: ReferenceTraining) -> tuple[Finding, ...]:
    """Note parameters that only rounding moves, and moments without a known field in optax."""
    idle = (
        f"{path}: its gradient is zero but for rounding, which an optimizer may turn into full "
        "steps: its drift is compared only with the spread"
        for path in sorted(reference.idle)
    )
    unknown = (
        f"{name} of torch's optimizer is not compared: the corresponding field of optax's states "
        "is not known"
        for name in reference.replays.own.moments
        if name not in MOMENT_FIELDS
    )
    return (*findings("drift", idle), *findings("moment-not-compared", unknown))


# --- arguments ---


def _validate(
    reference: torch.nn.Module,
    port: nnx.Module,
    batches: Any,
    recipe: Recipe,
    loss: Any,
    steps: Any,
    dtype: Any,
) -> None:
    """Raise ValueError with every reason why this training cannot be checked."""
    problems = _batch_problems(batches) + _dtype_problems(reference, port, dtype)
    if optimizer_problems := _optimizer_problems(reference, recipe):
        raise ValueError("\n".join([*problems, *optimizer_problems]))
    if isinstance(loss, str) and loss not in LOSSES:
        problems.append(
            f"loss: expected one of {', '.join(LOSSES)}, or two functions, got {loss!r}"
        )
    elif not isinstance(loss, str) and not (
        isinstance(loss, tuple) and len(loss) == 2 and all(map(callable, loss))
    ):
        problems.append(f"loss: expected torch's and JAX's functions, as a pair, got {loss!r}")
    if not (isinstance(steps, int) and not isinstance(steps, bool) and steps > 0):
        problems.append(f"steps: expected a whole number above 0, got {steps!r}")
    else:
        problems += _schedule_problems(reference, recipe, steps)
    options = (recipe.clip_norm, recipe.clip_value, recipe.accumulate, recipe.accumulated)
    problems += [f"{p.name}: {p.text}" for p in update_problems(*options)]
    if problems:
        raise ValueError("\n".join(problems))


def _type_problems(
    reference: Any, port: Any, layout: Any, recipe: Recipe, port_optimizer: Any
) -> list[str]:
    problems = type_problems(reference=reference, port=port, layout=layout)
    if not callable(recipe.optimizer):
        problems.append(
            "optimizer: expected a function of the module, because copies of it are trained, got "
            f"{type(recipe.optimizer).__name__}; such as lambda m: torch.optim.SGD(m.parameters())"
        )
    if recipe.schedule is not None and not callable(recipe.schedule):
        got = type(recipe.schedule).__name__
        problems.append(f"schedule: expected a function of the optimizer, got {got}")
    if port_optimizer is not None and not all(
        callable(getattr(port_optimizer, name, None)) for name in ("init", "update")
    ):
        problems.append(
            "port_optimizer: expected an optax transformation, with init and update, got "
            f"{type(port_optimizer).__name__}"
        )
    return problems


def _dtype_problems(reference: torch.nn.Module, port: nnx.Module, dtype: Any) -> list[str]:
    return [*x64_problems(dtype), *dtype_problems(reference, dtype)] + [
        f"port parameter {path!r}: expected {dtype}, got {a.dtype.name}"
        for path, a in parameters(port).items()
        if dtype in DTYPES and a.dtype.name != dtype
    ]


def _optimizer_problems(reference: torch.nn.Module, recipe: Recipe) -> list[str]:
    optimizer = recipe.optimizer(copy.deepcopy(reference))
    if isinstance(optimizer, torch.optim.Optimizer):
        return []
    got = type(optimizer).__name__
    return [f"optimizer: expected it to make a torch.optim optimizer, got {got}"]


def _schedule_problems(reference: torch.nn.Module, recipe: Recipe, steps: int) -> list[str]:
    if recipe.schedule is None:
        return []
    scheduler = recipe.schedule(recipe.optimizer(copy.deepcopy(reference)))
    if not isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler):
        got = type(scheduler).__name__
        return [f"schedule: expected it to make a torch scheduler, got {got}"]
    _, problems = learning_rates(scheduler, steps)
    return [f"{p.name}: {p.text}" for p in problems]


def _batch_problems(batches: Any) -> list[str]:
    if not isinstance(batches, Sequence) or not batches:
        return [f"batches: expected a list of dicts of NumPy arrays, got {type(batches).__name__}"]
    problems: list[str] = []
    first: dict[str, tuple] = {}
    for i, batch in enumerate(batches):
        if not isinstance(batch, Mapping) or TARGET not in batch:
            problems.append(f"batches[{i}]: expected a dict of arrays that contains {TARGET!r}")
            continue
        strangers = [
            name
            for name, a in batch.items()
            if not (isinstance(a, np.ndarray) and (a.dtype.kind in "biu" or is_float(a.dtype)))
        ]
        problems += [f"batches[{i}][{name!r}]: expected a NumPy array" for name in strangers]
        if not strangers:
            shapes = {name: (a.shape, a.dtype.name) for name, a in batch.items()}
            first = first or shapes
            if shapes != first:
                problems.append(f"batches[{i}]: expected one set of shapes, {first}, got {shapes}")
    return problems
