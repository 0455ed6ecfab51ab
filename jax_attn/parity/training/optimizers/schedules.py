"""A torch learning-rate scheduler as an optax schedule: what it sets, update by update."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn.transfer import Problem

Schedule = Callable[[jax.Array], jax.Array]


def learning_rates(scheduler: Any, steps: int) -> tuple[np.ndarray, list[Problem]]:
    """(the rate of each update, (groups, steps) float64; every reason why there is none).

    A copy is stepped as training does, after each update: any function of the count will do,
    and nobody has to know where a class starts to count. `scheduler` and its optimizer stay as
    they are.
    """

    def refused(text: str) -> tuple[np.ndarray, list[Problem]]:
        return np.empty(0), [Problem("refused", "schedule", text)]

    kind = type(scheduler).__name__
    if kind == "ReduceLROnPlateau":
        return refused("expected rates that follow from the count alone, got ReduceLROnPlateau")
    if (count := _count(scheduler)) != 0:
        return refused(f"expected a new scheduler, as optax counts from 0, got one at {count}")
    optimizer = scheduler.optimizer
    tensors = [p for group in optimizer.param_groups for p in group["params"]]
    memo: dict[int, Any] = {id(p): p for p in tensors} | {id(optimizer.state): {}}
    scheduler = copy.deepcopy(scheduler, memo)
    groups = scheduler.optimizer.param_groups
    before, rates = _options(groups), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no update is made between its steps
        for update in range(1, steps + 1):
            rates.append([float(group["lr"]) for group in groups])
            try:
                scheduler.step()
            except ValueError as error:  # OneCycleLR's, which has a last step
                got = f"{kind}'s for {update - 1}: {error}"
                return refused(f"expected rates for {steps} updates, got {got}")
            if (after := _options(groups)) != before:
                return refused(f"expected {kind} to set lr alone, got {before}, then {after}")
    return np.array(rates).T, []


def looked_up(rates: np.ndarray) -> Schedule:
    """The schedule that gives rates[count]; NaN beyond them, never a wrong rate."""

    def rate(count: jax.Array) -> jax.Array:
        table = jnp.asarray(rates, jnp.result_type(float))
        return table.at[count].get(mode="fill", fill_value=jnp.nan)

    return rate


def _count(scheduler: Any) -> int:
    """How many steps it has made; ChainedScheduler counts none itself."""
    if hasattr(scheduler, "last_epoch"):
        return scheduler.last_epoch
    return max(map(_count, scheduler._schedulers))


def _options(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The options by which an update is made, but for lr."""
    others = ("params", "lr", "initial_lr")
    numbers = int | float | tuple | None
    return [
        {k: v for k, v in group.items() if k not in others and isinstance(v, numbers)}
        for group in groups
    ]
