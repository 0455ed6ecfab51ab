"""Canaries: which options of a training the batches of a check could not reveal left out.

The reference's own side, in float64 and with one option left out, goes through the comparison in
the port's place: the updates from identical gradients and, where these do not show it, the free
run, in which a schedule may act later. One that stays within the budget means that a port without
that option would have passed: such a check is INCONCLUSIVE. Nothing is compiled for it.
"""

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jax_attn.parity.judge.compare import TensorReport, Verdict
from jax_attn.parity.training.jax_loop import FIELDS
from jax_attn.parity.training.torch_loop import Recipe


@dataclass(frozen=True)
class Canary:
    """option: of the recipe, or of the optimizer's param_groups. absent: its value where it is
    left out. why: what hides it, of a `Training`. would: what would reveal it."""

    option: str
    absent: Any
    why: Callable[[Any], str]
    would: str

    @property
    def of_recipe(self) -> bool:
        return self.option in Recipe.__dataclass_fields__

    def given(self, recipe: Recipe, groups: list[dict[str, Any]]) -> list[Any]:
        """The values that it is set to."""
        found = [getattr(recipe, self.option)] if self.of_recipe else _values(groups, self.option)
        return [value for value in found if value != self.absent]

    def left_out(self, recipe: Recipe) -> Recipe:
        change = {self.option: self.absent}
        return replace(recipe, **change) if self.of_recipe else recipe.with_options(**change)


def _values(groups: list[dict[str, Any]], option: str) -> list[Any]:
    return list(dict.fromkeys(group[option] for group in groups if option in group))


def _summed(training: Any) -> Iterator[list[np.ndarray]]:
    """The gradient of each update from the identical ones, tensor by tensor."""
    recipe, given = training.loop.recipe, training.given
    by = recipe.accumulate if recipe.accumulated == "mean" else 1
    for i in range(0, len(given), recipe.accumulate):
        parts = given[i : i + recipe.accumulate]
        yield [sum(np.float64(part[key]) for part in parts) / by for key in parts[0]]


def _largest_norm(training: Any) -> str:
    norms = [math.sqrt(sum(np.square(g).sum() for g in made)) for made in _summed(training)]
    return f"the largest gradient norm of the first {len(norms)} updates is {max(norms):.2g}"


def _largest_element(training: Any) -> str:
    most = [max(np.abs(g).max() for g in made) for made in _summed(training)]
    return f"the largest element of the first {len(most)} gradients is {max(most):.2g}"


def _short(training: Any) -> str:
    return f"the rate hardly changes in {training.steps} updates"


def _little(training: Any) -> str:
    return f"it moves no parameter by more than {training.loop.dtype} rounds"


_LARGER = "a larger one, a larger rate, or more steps"

CANARIES = (
    Canary("clip_norm", None, _largest_norm, "a clip_norm below that"),
    Canary("clip_value", None, _largest_element, "a clip_value below that"),
    Canary("schedule", None, _short, "as many steps as it takes to act"),
    Canary("weight_decay", 0.0, _little, _LARGER),
    Canary("momentum", 0.0, _little, _LARGER),
    Canary("dampening", 0.0, _little, _LARGER),
    Canary("nesterov", False, _little, _LARGER),
    Canary("centered", False, _little, _LARGER),
    Canary("lr_decay", 0.0, _little, _LARGER),
    Canary("momentum_decay", 0.0, _little, _LARGER),
)

EPS = Canary("eps", 0.0, _little, _LARGER)
"""Of most gradients no part at its default, in any check: where it does not show, a note."""


def tried(training: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(doubts, notes): each option that would not have been missed.

    training: the reference's side of the check, a `training.Training`.
    """
    if not _moves(training):
        return (
            "blind: no parameter moves, a port that makes no update would pass; what would reveal "
            "it: a rate above 0, and batches with a gradient",
        ), ()
    recipe = training.loop.recipe
    groups = recipe.optimizer(copy.deepcopy(training.loop.module)).param_groups
    doubts = [
        f"blind: these batches would not reveal {_named(canary, given)} left out: "
        f"{canary.why(training)}; what would: {canary.would}"
        for canary in CANARIES
        if (given := canary.given(recipe, groups))
        and not _seen_in_updates(training, canary.left_out(recipe))
        and not _seen_in_free_run(training, canary.left_out(recipe))
    ]
    notes = [
        f"{_named(EPS, given)} is not shown: without it, these gradients make the same updates"
        for given in [EPS.given(recipe, groups)]
        if given and not _seen_in_updates(training, EPS.left_out(recipe))
    ]
    return tuple(doubts), tuple(notes)


def _named(canary: Canary, given: list[Any]) -> str:
    if canary.option == "schedule":
        return "the schedule"
    return f"{canary.option}={', '.join(map(str, given))}"


def _moves(training: Any) -> bool:
    centre = training.free[1]
    return any(a.any() for moved in centre.moved.values() for a in moved.values())


def _seen_in_updates(training: Any, recipe: Recipe) -> bool:
    made = replace(training.loop, recipe=recipe).replay(training.given, seed=0)
    state = {FIELDS[name]: kept for name, kept in made.state.items() if name in FIELDS}
    got = replace(made, state=state)
    return bool(training.lacking(got)) or _fails(training.compare_updates(got))


def _seen_in_free_run(training: Any, recipe: Recipe) -> bool:
    made = replace(training.loop, recipe=recipe).train(training.steps, seed=0)
    return _fails(training.compare_free(made))


def _fails(reports: Iterable[TensorReport]) -> bool:
    return any(report.verdict is Verdict.FAIL for report in reports)
