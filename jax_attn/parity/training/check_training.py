"""Check that a port trains as its reference does: gradients, updates, state, a free run.

Two runs of one training drift apart, however right both are: a bound that grows step by step says
nothing after fifty. A free run is held instead to the spread of a handful of float64 torch runs,
each perturbed operation by operation at roundoff, the optimizer's own operations included. Where
that spread is too wide to tell a wrong run from a right one, the verdict is INCONCLUSIVE.

A verdict flows in one direction: arguments -> recipe -> the reference's runs (`ReferenceTraining`)
-> the port's runs (`PortLoop`) -> one report a tensor (`comparison`) -> `Result`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import optax
import torch
from flax import nnx

from jax_attn.parity.checking.canaries import DoubtsAndNotes
from jax_attn.parity.checking.weights import compare_weights
from jax_attn.parity.judge.result import Result
from jax_attn.parity.run.port import full_precision
from jax_attn.parity.training.arguments import validate
from jax_attn.parity.training.canaries import try_canaries
from jax_attn.parity.training.comparison import compare_free_run, compare_replay, missing_moments
from jax_attn.parity.training.losses import LOSSES, with_loss
from jax_attn.parity.training.port_loop import PortLoop
from jax_attn.parity.training.recipe import MakeOptimizer, MakeScheduler, Recipe
from jax_attn.parity.training.reference_training import ReferenceTraining
from jax_attn.parity.training.runs import MOMENT_FIELDS
from jax_attn.transfer import Layout

OWN_OPTIMIZER = (
    "port_optimizer: the one given. Where it is optax's own: its adam, adamw and nadam take "
    "1 - b**t in float32, off by some 1e-5 at first, and its clip_by_global_norm has none of "
    "torch's 1e-6; `parity.optax_like` has both as torch has them"
)


def check_training(
    reference: torch.nn.Module,
    port: nnx.Module,
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
    """Whether `port`, compiled and under optax, trains as `reference` does in eager torch.

    reference, port: both with the same weights in place, in `dtype`; copies are trained, neither
        is changed. In bfloat16 and float16 the weights are rounded copies of float32 masters,
        which alone are updated, by gradients cast to float32, in both frameworks.
    batches: dicts of NumPy arrays of one set of shapes, taken in turn. "target" goes to the loss,
        the rest by keyword to both modules, or to the `_call`s as in `check`. Dropout: a module
        that draws is refused; hand its keep masks in with each batch.
    optimizer: module -> `torch.optim` optimizer of it; schedule: optimizer -> its scheduler,
        stepped after each update.
    loss: one of `LOSSES`, or (torch's, JAX's): (output, target) -> scalar.
    steps: updates of the free run. clip_norm, clip_value, accumulate, accumulated: as for
        `optax_like`; an update takes `accumulate` batches.
    port_optimizer: an optax transformation; `optax_like` of the reference's unless given. Beside
        torch's, optax's own `adam`, `adamw`, `nadam` and `clip_by_global_norm` are off by more
        than rounding (`OWN_OPTIMIZER`), and FAIL.

    Judged apart, under the port's names: the gradients of the first batch; the parameters after
    one update and after three, from identical gradients, torch's own; the optimizer's state then;
    the loss and the parameters of a free run, here and there on its way and at its end. Of
    parameters, how far they moved is compared: beside them an update would be small. An option of
    the recipe that would not be missed makes the check INCONCLUSIVE (`canaries`).

    Raises TypeError, ValueError or TransferError for what cannot be checked, naming each.
    """
    recipe = Recipe(optimizer, schedule, clip_norm, clip_value, accumulate, accumulated)
    validate(reference, port, layout, batches, recipe, loss, steps, dtype, port_optimizer)
    torch_loss, jax_loss = LOSSES[loss] if isinstance(loss, str) else loss
    training = ReferenceTraining.of(
        reference,
        batches,
        recipe,
        steps,
        with_loss(reference_call, torch_loss),
        dtype,
        layout=layout,
        port=port,
    )
    if problems := training.loop.problems():
        raise ValueError("\n".join(problems))
    tx = port_optimizer or training.optax_like(port)
    return judge(
        training,
        PortLoop(port, with_loss(port_call, jax_loss), batches, dtype),
        tx,
        try_canaries(training),
        failures=compare_weights(reference, port, layout).differences,
        notes=() if port_optimizer is None else (OWN_OPTIMIZER,),
    )


def judge(
    reference: ReferenceTraining,
    port: PortLoop,
    tx: optax.GradientTransformation,
    canaries: DoubtsAndNotes,
    *,
    failures: Sequence[str] = (),
    notes: Sequence[str] = (),
    name: str = "training",
) -> Result:
    """Train the port by `tx` and compare what is left behind.

    canaries: of the same reference. failures, notes: those known before the comparison.
    """
    loop = reference.loop
    gradients = [loop.to_paths(by_key) for by_key in reference.gradients]
    with full_precision() as (backend, pinned):
        replay = port.replay(tx, gradients, loop.recipe.accumulate)
        free_run = port.free_run(tx, reference.steps, loop.recipe.accumulate)
    return Result(
        dtype=loop.dtype,
        backend=backend,
        tensors=(*compare_replay(reference, replay), *compare_free_run(reference, free_run)),
        failures=(*failures, *missing_moments(reference, replay)),
        doubts=canaries.doubts,
        notes=(*notes, *_not_compared(reference), *pinned, *canaries.notes),
        name=name,
        details={"steps": str(reference.steps)},
    )


def _not_compared(reference: ReferenceTraining) -> list[str]:
    """Notes on parameters that rounding alone moves, and on moments that optax has no field for."""
    idle = [
        f"{path}: its gradient is zero but for rounding, of which an optimizer may make whole "
        "steps: its drift is held to the spread alone"
        for path in sorted(reference.idle)
    ]
    return idle + [
        f"{name} of torch's optimizer is not compared: which field of optax's states would "
        "hold it is not known"
        for name in reference.replays.own.moments
        if name not in MOMENT_FIELDS
    ]
