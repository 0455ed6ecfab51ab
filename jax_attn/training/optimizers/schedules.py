"""Rates, and cycled momentum, of a torch scheduler: a table with a row for each update."""

import copy
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn.transfer import Problem

Group = Mapping[str, Any]
Schedule = Callable[[jax.Array], jax.Array]


def learning_rates(scheduler: Any, steps: int) -> tuple[np.ndarray, list[Problem]]:
    """Return (the rate of each next update, (groups, steps) float64; why there are none)."""
    tables, problems = scheduled(scheduler, steps)
    return np.array([table["lr"] for table in tables]), problems


def scheduled(scheduler: Any, steps: int) -> tuple[list[dict[str, np.ndarray]], list[Problem]]:
    """Return (for each group, what is scheduled -> its value in each next update; why not).

    That is "lr" and, if the scheduler cycles it, "momentum" or "beta1". A copy of the scheduler is
    stepped as in training, after each update. So any function of the count works, wherever a class
    starts to count. `scheduler` and its optimizer are not changed.
    """

    def refused(text: str) -> tuple[list[dict[str, np.ndarray]], list[Problem]]:
        return [], [Problem("refused", "schedule", text)]

    kind = type(scheduler).__name__
    if kind == "ReduceLROnPlateau":
        return refused("expected rates that follow from the count alone, got ReduceLROnPlateau")
    optimizer = scheduler.optimizer
    tensors = [p for group in optimizer.param_groups for p in group["params"]]
    memo: dict[int, Any] = {id(p): p for p in tensors} | {id(optimizer.state): {}}
    scheduler = copy.deepcopy(scheduler, memo)
    groups = scheduler.optimizer.param_groups
    before, rows = _options(groups), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns, as no update is made between its steps
        for update in range(1, steps + 1):
            rows.append([_values(group) for group in groups])
            try:
                scheduler.step()
            except ValueError as error:  # OneCycleLR has a last step
                got = f"{kind}'s for {update - 1}: {error}"
                return refused(f"expected rates for {steps} updates, got {got}")
            if (after := _options(groups)) != before:
                text = f"expected {kind} to set only lr, momentum or the first beta, got {before}, "
                return refused(f"{text}then {after}")
    tables = [
        {name: np.array([values[name] for values in column]) for name in column[0]}
        for column in zip(*rows, strict=True)
    ]
    return [_changing(table) for table in tables], []


def _values(group: Group) -> dict[str, float]:
    """Return what a scheduler may set of a group: its rate, and its momentum or first beta."""
    values = {name: float(group[name]) for name in ("lr", "momentum") if name in group}
    return values | ({"beta1": float(group["betas"][0])} if "betas" in group else {})


def _changing(table: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: row for name, row in table.items() if name == "lr" or np.ptp(row)}


def cycled(group: Group, table: Mapping[str, np.ndarray]) -> Group:
    """Return a group with the momentum, or first beta, of each update."""
    if "beta1" in table:
        return {**group, "betas": (table["beta1"], *group["betas"][1:])}
    return {**group, "momentum": table["momentum"]} if "momentum" in table else group


def looked_up(rates: np.ndarray) -> Schedule:
    """Return the schedule that gives rates[count]; beyond them NaN, never a wrong rate."""

    def rate(count: jax.Array) -> jax.Array:
        table = jnp.asarray(rates, jnp.result_type(float))
        return table.at[count].get(mode="fill", fill_value=jnp.nan)

    return rate


def steps_made(scheduler: Any) -> int:
    """Return how many steps a scheduler has made; ChainedScheduler itself does not count."""
    if hasattr(scheduler, "last_epoch"):
        return scheduler.last_epoch
    return max(map(steps_made, scheduler._schedulers))


def _options(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return each group's options that affect an update, except those that are scheduled."""
    others = ("params", "lr", "initial_lr", "momentum")
    numbers = int | float | tuple | None
    return [
        {
            k: v[1:] if isinstance(v, tuple) and k == "betas" else v
            for k, v in group.items()
            if k not in others and isinstance(v, numbers)
        }
        for group in groups
    ]
