"""Check that a port trains as its reference does: gradients, updates, state, a free run.

Two runs of one training drift apart, however right both are: a bound that grows step by step says
nothing after fifty. A free run is held instead to the spread of a handful of float64 torch runs,
each perturbed operation by operation at roundoff, the optimizer's own operations included. Where
that spread is too wide to tell a wrong run from a right one, the verdict is INCONCLUSIVE.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np
import torch
from flax import nnx

from jax_attn.parity.checking.check import compare_weights
from jax_attn.parity.judge.budget import PRECISIONS, RUNS, Budget
from jax_attn.parity.judge.compare import TensorReport, judge
from jax_attn.parity.judge.result import Result
from jax_attn.parity.training import canaries as training_canaries
from jax_attn.parity.training.arguments import LOSSES, rounded, validate, with_loss
from jax_attn.parity.training.jax_loop import FIELDS, PortLoop
from jax_attn.parity.training.optax_like import optax_like
from jax_attn.parity.training.torch_loop import Recipe, TorchLoop
from jax_attn.parity.training.trajectory import UPDATES, Trajectory, Updated, of_masters
from jax_attn.transfer import Layout, flatten

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
    optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer],
    loss: str | tuple[Callable[..., Any], Callable[..., Any]],
    steps: int = 10,
    schedule: Callable[[torch.optim.Optimizer], Any] | None = None,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    accumulate: int = 1,
    accumulated: str = "sum",
    port_optimizer: Any = None,
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
    the recipe that would not be missed makes the check INCONCLUSIVE (`training_canaries`).

    Raises TypeError, ValueError or TransferError for what cannot be checked, naming each.
    """
    recipe = Recipe(optimizer, schedule, clip_norm, clip_value, accumulate, accumulated)
    validate(reference, port, layout, batches, recipe, loss, steps, dtype, port_optimizer)
    losses = LOSSES[loss] if isinstance(loss, str) else loss
    prepared = Training.of(
        reference,
        batches,
        recipe,
        steps,
        losses[0],
        reference_call,
        dtype,
        layout=layout,
        port=port,
    )
    if problems := prepared.loop.problems():
        raise ValueError("\n".join(problems))
    made = port_optimizer or prepared.optax_like(port)
    failures = compare_weights(reference, port, layout)
    loop = PortLoop(port, with_loss(port_call, losses[1]), batches, dtype)
    notes = () if port_optimizer is None else (OWN_OPTIMIZER,)
    return prepared.judge(loop, made, failures=failures, notes=notes)


@dataclass(frozen=True)
class Training:
    """The reference's side of a training check: everything that does not depend on the port.

    runs: how many perturbed ones.
    """

    loop: TorchLoop
    steps: int
    layout: Layout
    runs: int = RUNS

    @classmethod
    def of(cls, reference, batches, recipe, steps, loss, call, dtype, *, layout, port):
        """port: for the shapes of its parameters alone."""
        shapes = {path: a.shape for path, a in flatten(port).items()}
        loop = TorchLoop(
            reference,
            with_loss(call, loss),
            [rounded(batch, dtype) for batch in batches],
            recipe,
            dtype,
            lambda tensors: layout.to_flax(tensors, shapes),
        )
        return cls(loop, steps, layout)

    def optax_like(self, port: nnx.Module) -> Any:
        """What equals the reference's optimizer, on this port."""
        recipe, module = self.loop.recipe, copy.deepcopy(self.loop.module)
        optimizer = recipe.optimizer(module)
        scheduler = recipe.schedule(optimizer) if recipe.schedule else None
        key = {id(p): name for name, p in module.named_parameters()}
        names = [[key[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        return optax_like(
            optimizer,
            schedule=scheduler,
            # The updates from identical gradients may be more than those of a short free run.
            steps=max(self.steps, self.updates) if scheduler else None,
            clip_norm=recipe.clip_norm,
            clip_value=recipe.clip_value,
            accumulate=recipe.accumulate,
            accumulated=recipe.accumulated,
            port=port,
            layout=self.layout,
            names=names,
        )

    @cached_property
    def given(self) -> list[dict[str, np.ndarray]]:
        """The identical gradients, by torch key."""
        return self.loop.gradients(self.updates)

    @cached_property
    def updates(self) -> int:
        """From identical gradients; a schedule may have fewer rates."""
        return UPDATES if self.loop.scheduled(UPDATES) else min(UPDATES, self.steps)

    @cached_property
    def updated(self) -> tuple[Updated, Updated, list[Updated]]:
        """After them: torch as it is, the float64 centre, the perturbed runs."""
        centre, *runs = (self.loop.replay(self.given, seed) for seed in range(self.runs + 1))
        return self.loop.replay(self.given), centre, runs

    @cached_property
    def free(self) -> tuple[Trajectory, Trajectory, list[Trajectory]]:
        """Free runs: torch as it is, the float64 centre, the perturbed ones."""
        centre, *runs = (self.loop.train(self.steps, seed) for seed in range(self.runs + 1))
        return self.loop.train(self.steps), centre, runs

    @cached_property
    def idle(self) -> frozenset[str]:
        """Paths whose gradient is zero in theory (a key's bias), in every batch: where they go is
        rounding alone, of which Adam makes steps as large as any."""
        centre, runs = self.free[1:]
        budgets = {p: self._budget([run.sizes[p] for run in (centre, *runs)]) for p in centre.sizes}
        return frozenset(p for p, b in budgets.items() if max(centre.sizes[p]) <= b.zero)

    @cached_property
    def canaries(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """(doubts, notes): what of the recipe would not be missed."""
        return training_canaries.tried(self)

    def _budget(self, arrays: Sequence[np.ndarray], precision: str | None = None) -> Budget:
        centre, *runs = (np.asarray(a).astype(np.float64) for a in arrays)
        return Budget.of(centre, runs, PRECISIONS[precision or self.loop.dtype])

    def judge(
        self,
        port: PortLoop,
        tx: Any,
        *,
        failures: Sequence[str] = (),
        notes: Sequence[str] = (),
        **identity,
    ) -> Result:
        """Train the port by `tx` and compare what is left behind."""
        chosen = jax.config.jax_default_device
        backend = chosen.platform if chosen is not None else jax.default_backend()
        with jax.default_matmul_precision("highest" if backend != "cpu" else None):
            recipe = self.loop.recipe
            given = [self.loop.to_paths(g) for g in self.given]
            replayed = port.replay(tx, given, recipe.accumulate)
            trained = port.train(tx, self.steps, recipe.accumulate)
        lacking = self.lacking(replayed)
        doubts, unshown = self.canaries
        told = [
            f"{path}: its gradient is zero but for rounding, of which an optimizer may make whole "
            "steps: its drift is held to the spread alone"
            for path in sorted(self.idle)
        ]
        told += [
            f"{name} of torch's optimizer is not compared: which field of optax's states would "
            "hold it is not known"
            for name in self.updated[0].state
            if name not in FIELDS
        ]
        if backend != "cpu":
            told.append('matmul precision pinned to "highest"')
        return Result(
            dtype=self.loop.dtype,
            backend=backend,
            tensors=(*self.compare_updates(replayed), *self.compare_free(trained)),
            failures=(*failures, *lacking),
            doubts=doubts,
            notes=(*notes, *told, *unshown),
            name=identity.pop("name", "training"),
            details={"steps": str(self.steps)},
            **identity,
        )

    def lacking(self, got: Updated) -> list[str]:
        """Moments that torch keeps and the port's optimizer does not."""
        return [
            f"optimizer state: torch keeps {name} of {path}, the port's optimizer has none"
            for name, kept in self.updated[0].state.items()
            if name in FIELDS
            for path in kept
            if path not in got.state.get(FIELDS[name], {})
        ]

    def compare_updates(self, got: Updated) -> Iterator[TensorReport]:
        """After one update and after the last, from identical gradients: how far parameters
        moved, and the state."""
        own, centre, runs = self.updated
        kept = of_masters(self.loop.dtype)
        for n in sorted({1, max(centre.moved)}):
            for path in centre.moved[n]:
                yield self._report(
                    f"update of {path}",
                    f"update {n}",
                    got.moved[n][path],
                    own.moved[n][path],
                    [run.moved[n][path] for run in (centre, *runs)],
                    kept,
                    idle=path in self.idle,
                )
        for name, moment in centre.state.items():
            ours = got.state.get(FIELDS.get(name, ""), {})
            for path in (path for path in moment if path in ours):
                yield self._report(
                    f"{name} of {path}",
                    f"update {max(centre.moved)}",
                    ours[path],
                    own.state[name][path],
                    [run.state[name][path] for run in (centre, *runs)],
                    kept,
                )

    def compare_free(self, got: Trajectory) -> Iterator[TensorReport]:
        own, centre, runs = self.free
        every = (centre, *runs)
        for path in centre.gradients:
            arrays = [run.gradients[path] for run in every]
            yield self._report(
                path,
                "first batch",
                got.gradients[path],
                own.gradients[path],
                arrays,
                kind="gradient of parameter",
            )
        start = 0
        for step in centre.moved:
            end = step * self.loop.recipe.accumulate
            part = slice(start, end)
            arrays = [run.losses[part] for run in every]
            label = f"losses {start + 1}-{end}"
            yield self._report("loss", label, got.losses[part], own.losses[part], arrays)
            start = end
            for path in centre.moved[step]:
                arrays = [run.moved[step][path] for run in every]
                report = (f"moved {path}", f"step {step}", got.moved[step][path])
                yield self._report(*report, own.moved[step][path], arrays, idle=path in self.idle)

    def _report(
        self, name, transform, got, own, arrays, precision=None, *, kind="output", idle=False
    ) -> TensorReport:
        budget = self._budget(arrays, precision)
        if idle:
            budget = replace(budget, zero=math.inf)
        want, got, own = (np.asarray(a).astype(np.float64) for a in (arrays[0], got, own))
        return judge(want, got, own, budget, kind=kind, name=name, transform=transform)
