"""Check that a port trains as its reference does: gradients, updates, state, a free run.

Two runs of one training drift apart even if both are right, so a bound that grows with each step
says nothing after fifty steps. A free run is compared instead with the spread of a few float64
torch runs, in which every operation is perturbed at roundoff, the optimizer's operations included.
If that spread is too wide to tell a wrong run from a right one, the verdict is INCONCLUSIVE.

Data flows in one direction: arguments -> recipe -> the reference's runs (`ReferenceTraining`)
-> the port's runs (`PortTraining`) -> one report per tensor (`compare_…`) -> `Result`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import optax
import torch

from jax_attn.parity.checking.weights import Weights, compare_weights
from jax_attn.parity.judge.result import Result
from jax_attn.training.arguments import expect_valid, training_type_problems
from jax_attn.training.canaries import try_canaries
from jax_attn.training.judging import judge
from jax_attn.training.port_loop import PortLoop, PortTraining
from jax_attn.training.recipe import LOSSES, MakeOptimizer, MakeScheduler, Recipe, with_loss
from jax_attn.training.reference_training import ReferenceTraining
from jax_attn.training.resumed import resumed
from jax_attn.transfer import Layout
from jax_attn.transfer.kinds.held import as_call, as_module


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
    port_state: Any = None,
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
      optimizer: a function from a module to its `torch.optim` optimizer. A state that it loads into
        the optimizer is where the training goes on from, on both sides.
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
      port_state: the optax state, or nnx.Optimizer, that the port goes on from; it is compared with
        the state of torch's optimizer, bit for bit: pass the state that the run saved, or that
        `load_optimizer` returns. The default is torch's state, carried through the table,
        which works for Adam, AdamW and SGD; with a new torch optimizer, a new state.
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
    if problems := training_type_problems(reference, port, layout, recipe, port_optimizer):
        raise TypeError("\n".join(problems))
    port, port_call = as_module(port), as_call(port, port_call)
    expect_valid(reference, port, batches, recipe, loss, steps, dtype)
    torch_loss, jax_loss = LOSSES[loss] if isinstance(loss, str) else loss
    of_batch = with_loss(reference_call, torch_loss)
    training = ReferenceTraining.of(
        reference, batches, recipe, steps, of_batch, dtype, layout=layout, port=port
    )
    if problems := training.loop.problems():
        raise ValueError("\n".join(problems))
    tx = port_optimizer or training.optax_like(port)
    loop = PortLoop(port, with_loss(port_call, jax_loss), batches, dtype)
    begun = resumed(training, tx, loop.start, port_state)
    weights = compare_weights(Weights.of(reference), port, layout)
    notes = [note for note in weights.notes if note.kind != "gradients-not-paired"]
    return judge(
        training,
        PortTraining(loop, tx, accumulate, begun.arrays),
        try_canaries(training),
        failures=(*weights.differences, *begun.differences),
        notes=(*notes, *begun.notes),
    )
