"""Canaries: options of a training whose absence the batches of a check could not reveal.

The reference's own training, in float64 and with one option left out, takes the port's place in the
comparison: first the updates from identical gradients, then, if these do not reveal it, the free
run, in which a schedule may act later. If it stays within the budget, a port without that option
would have passed, and the check is INCONCLUSIVE. Nothing is compiled for this.
"""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jax_attn.parity.checking.canaries import DoubtsAndNotes
from jax_attn.parity.judge.compare import Verdict
from jax_attn.parity.judge.finding import Finding, findings
from jax_attn.training.recipe import Recipe
from jax_attn.training.reference_training import (
    ReferenceTraining,
    compare_free_run,
    compare_replay,
    missing_moments,
)
from jax_attn.training.torch_loop import TorchLoop


@dataclass(frozen=True)
class Canary:
    """The bug of leaving one option out.

    option: a field of the recipe, or an option in the optimizer's param_groups. absent: its value
    when it is left out. hidden_by: why the batches hide it. revealed_by: what would reveal it.
    """

    option: str
    absent: Any
    hidden_by: Callable[[ReferenceTraining], str]
    revealed_by: str

    @property
    def of_recipe(self) -> bool:
        return self.option in Recipe.__dataclass_fields__

    def values(self, recipe: Recipe, groups: Sequence[dict[str, Any]]) -> list[Any]:
        """Return the values of the option that are not `absent`."""
        values = [getattr(recipe, self.option)] if self.of_recipe else []
        if not self.of_recipe:
            values = list(dict.fromkeys(g[self.option] for g in groups if self.option in g))
        return [value for value in values if value != self.absent]

    def planted_in(self, loop: TorchLoop) -> TorchLoop:
        """Return the same training without the option."""
        recipe, absent = loop.recipe, {self.option: self.absent}
        recipe = replace(recipe, **absent) if self.of_recipe else recipe.with_options(**absent)
        return replace(loop, recipe=recipe)

    def named(self, values: list[Any]) -> str:
        if self.option == "schedule":
            return "the schedule"
        return f"{self.option}={', '.join(map(str, values))}"


def _gradients_of_updates(training: ReferenceTraining) -> Iterator[list[np.ndarray]]:
    """Yield the gradient of each update from identical gradients, tensor by tensor."""
    recipe, gradients = training.loop.recipe, training.gradients
    divisor = recipe.accumulate if recipe.accumulated == "mean" else 1
    for i in range(0, len(gradients), recipe.accumulate):
        batches = gradients[i : i + recipe.accumulate]
        yield [
            np.sum([np.float64(g[key]) for g in batches], axis=0) / divisor for key in batches[0]
        ]


def _largest_norm(training: ReferenceTraining) -> str:
    updates = list(_gradients_of_updates(training))
    norm = max(math.sqrt(sum(np.square(g).sum() for g in update)) for update in updates)
    return f"the largest gradient norm of the first {len(updates)} updates is {norm:.2g}"


def _largest_element(training: ReferenceTraining) -> str:
    updates = list(_gradients_of_updates(training))
    largest = max(np.abs(g).max() for update in updates for g in update)
    return f"the largest element of the first {len(updates)} gradients is {largest:.2g}"


def _too_few_updates(training: ReferenceTraining) -> str:
    return f"the rate hardly changes in {training.steps} updates"


def _too_small(training: ReferenceTraining) -> str:
    return f"it moves no parameter by more than {training.loop.dtype} rounding"


_LARGER = "a larger value, a larger rate, or more steps"

CANARIES = (
    Canary("clip_norm", None, _largest_norm, "a clip_norm below that"),
    Canary("clip_value", None, _largest_element, "a clip_value below that"),
    Canary("schedule", None, _too_few_updates, "enough steps for the schedule to act"),
    Canary("weight_decay", 0.0, _too_small, _LARGER),
    Canary("momentum", 0.0, _too_small, _LARGER),
    Canary("dampening", 0.0, _too_small, _LARGER),
    Canary("nesterov", False, _too_small, _LARGER),
    Canary("centered", False, _too_small, _LARGER),
    Canary("lr_decay", 0.0, _too_small, _LARGER),
    Canary("momentum_decay", 0.0, _too_small, _LARGER),
)

EPS = Canary("eps", 0.0, _too_small, _LARGER)
"""If `eps` is too small to affect any gradient, as its default often is, the report adds a note."""


def try_canaries(training: ReferenceTraining) -> DoubtsAndNotes:
    """Plant each canary in the reference, and doubt the batches that do not reveal it."""
    if not _moves(training):
        doubt = (
            "blind batches: they move no parameter, so a port that makes no update would pass; to "
            "reveal it, use a rate above 0, and batches with a gradient"
        )
        return DoubtsAndNotes((Finding("no-update", doubt),), ())
    recipe = training.loop.recipe
    groups = recipe.optimizer(copy.deepcopy(training.loop.module)).param_groups
    doubts = (
        f"blind batches: they would not reveal {canary.named(values)} left out, because "
        f"{canary.hidden_by(training)}; to reveal it, use {canary.revealed_by}"
        for canary in CANARIES
        if (values := canary.values(recipe, groups))
        and not _seen_in_replay(training, canary)
        and not _seen_in_free_run(training, canary)
    )
    notes = (
        f"{EPS.named(values)} is not shown: without it, these gradients make the same updates"
        for values in [EPS.values(recipe, groups)]
        if values and not _seen_in_replay(training, EPS)
    )
    kind = "option-left-out"
    return DoubtsAndNotes(findings(kind, doubts), findings(kind, notes))


def _moves(training: ReferenceTraining) -> bool:
    moved = training.free_runs.exact.moved
    return any(distance.any() for by_path in moved.values() for distance in by_path.values())


def _seen_in_replay(training: ReferenceTraining, canary: Canary) -> bool:
    replay = canary.planted_in(training.loop).replay(training.gradients, seed=0)
    reports = compare_replay(training, replay)
    return bool(missing_moments(training, replay)) or any(
        r.verdict is Verdict.FAIL for r in reports
    )


def _seen_in_free_run(training: ReferenceTraining, canary: Canary) -> bool:
    run = canary.planted_in(training.loop).free_run(training.steps, seed=0)
    return any(r.verdict is Verdict.FAIL for r in compare_free_run(training, run))
