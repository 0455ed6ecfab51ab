"""Canaries: options of a training whose absence the batches of a check could not reveal.

The reference's own training, in float64 and with one option left out, takes the port's place in the
comparison: first the updates from identical gradients, then, if these do not reveal it, the free
run, in which a schedule may act later. If it stays within the budget, a port without that option
would have passed, and the check is INCONCLUSIVE. Nothing is compiled for this.
"""

import copy
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from jax_attn.parity.judge.compare import TensorReport, Verdict
from jax_attn.parity.judge.finding import Finding, Findings, findings
from jax_attn.training.bugs import OPTIONS, own_values, with_options
from jax_attn.training.optimizers.schedules import scheduled
from jax_attn.training.reference_training import (
    ReferenceTraining,
    compare_free_run,
    compare_replay,
    missing_moments,
)
from jax_attn.training.torch_loop import TorchLoop


def try_canaries(training: ReferenceTraining) -> Findings:
    """Leave out each option of the reference, and doubt the batches that do not reveal it."""
    if not _moves(training):
        doubt = (
            "blind batches: they move no parameter, so a port that makes no update would pass; to "
            "reveal it, use a rate above 0, and batches with a gradient"
        )
        return Findings(doubts=(Finding("no-update", doubt),))
    doubts, notes = [], []
    recipe = training.loop.recipe
    optimizer = recipe.optimizer(copy.deepcopy(training.loop.module))
    groups, cycled = optimizer.param_groups, set()
    if recipe.schedule is not None:  # what it sets, an option of the optimizer does not
        tables, _ = scheduled(recipe.schedule(optimizer), training.steps)
        cycled = {name for table in tables for name in table}
    for name, option in OPTIONS.items():
        values = [x for x in own_values(name, recipe, groups) if x != option.absent]
        if not values or not option.is_asked or name in cycled:
            continue
        changed = with_options(recipe, **{name: option.absent})
        without = replace(training.loop, recipe=changed)
        if _is_seen_in_replay(training, without):
            continue
        if name == "eps":  # as the default often is, it may be too small to affect any gradient
            notes.append(
                f"{_named(name, values)} is not shown: without it, these gradients make the same "
                "updates"
            )
        elif not _has_failed(compare_free_run(training, without.free_run(training.steps, seed=0))):
            doubts.append(
                f"blind batches: they would not reveal {_named(name, values)} left out, because "
                f"{option.hidden_by(training)}; to reveal it, use {option.revealed_by}"
            )
    kind = "option-left-out"
    return Findings(doubts=findings(kind, doubts), notes=findings(kind, notes))


def _named(option: str, values: list[Any]) -> str:
    return "the schedule" if option == "schedule" else f"{option}={', '.join(map(str, values))}"


def _moves(training: ReferenceTraining) -> bool:
    moved = training.free_runs.exact.moved
    return any(distance.any() for by_path in moved.values() for distance in by_path.values())


def _is_seen_in_replay(training: ReferenceTraining, without: TorchLoop) -> bool:
    replay = without.replay(training.gradients, seed=0)
    return bool(missing_moments(training, replay)) or _has_failed(compare_replay(training, replay))


def _has_failed(reports: Iterable[TensorReport]) -> bool:
    return any(report.verdict is Verdict.FAIL for report in reports)
