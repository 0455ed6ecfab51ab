"""Common mistakes in a recipe: another rate, another value of an option, or an omitted option."""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from jax_attn.parity.judge.finding import Finding
from jax_attn.training.recipe import Recipe

Groups = list[dict[str, Any]]
"""The param_groups of an optimizer."""

_BOOLEANS = ("nesterov", "centered", "maximize", "decoupled_weight_decay")
_NUMBERS: dict[str, tuple[Any, ...]] = {
    "weight_decay": (0.0, 1e-4, 1e-2),
    "momentum": (0.0,),
    "dampening": (0.0,),
    "eps": (0.0, 1e-6, 1e-7, 1e-8, 1e-10, 1e-15),
    "betas": ((0.9, 0.999), (0.9, 0.99), (0.9, 0.98), (0.9, 0.95)),
    "alpha": (0.9, 0.99),
    "lr_decay": (0.0,),
    "momentum_decay": (0.0, 4e-3),
}
"""Option of an optimizer -> its usual values in frameworks and papers; 0 for an omitted option."""


@dataclass(frozen=True)
class RecipeVariant:
    """A changed recipe. says: the change in words, to follow "with"."""

    says: Finding
    recipe: Recipe


def variants(recipe: Recipe, groups: Groups, factor: float) -> Iterator[RecipeVariant]:
    """Yield changed recipes. factor: of the learning rate, found from the port's first update."""
    rates = [group["lr"] for group in groups]
    if abs(factor - 1) > 1e-6:
        says = Finding("recipe-rate", f"a learning rate {factor:.6g} times as large")
        yield RecipeVariant(says, _per_group(recipe, "lr", [factor * lr for lr in rates]))
    for option in _BOOLEANS:
        for value in _own(option, groups):
            yield _with(recipe, option, not value, value)
    for option, usual in _NUMBERS.items():
        own = _own(option, groups)
        exchanged = tuple(value[::-1] for value in own if option == "betas")
        for value in dict.fromkeys((*usual, *exchanged, *own)) if own else ():
            if own != [value]:
                yield _with(recipe, option, value, *own)
    yield from _beside_the_optimizer(recipe)


def _own(option: str, groups: Groups) -> list[Any]:
    return list(dict.fromkeys(group[option] for group in groups if option in group))


def _with(recipe: Recipe, option: str, value: Any, *own: Any) -> RecipeVariant:
    where = " in every group" if len(own) > 1 else ""
    says = f"{option}={value}{where} in place of {', '.join(map(str, own))}"
    changed = recipe.with_options(**{option: value})
    return RecipeVariant(Finding("recipe-option", says), changed)


def _per_group(recipe: Recipe, option: str, values: list[Any]) -> Recipe:
    def changed(module: torch.nn.Module) -> torch.optim.Optimizer:
        optimizer = recipe.optimizer(module)
        for group, value in zip(optimizer.param_groups, values, strict=True):
            group[option] = value
        return optimizer

    return replace(recipe, optimizer=changed)


def _beside_the_optimizer(recipe: Recipe) -> Iterator[RecipeVariant]:
    """Yield variants of clipping, schedule and accumulation."""
    for option in ("clip_norm", "clip_value", "schedule"):
        if getattr(recipe, option) is not None:
            absent: dict[str, Any] = {option: None}
            kind = "recipe-schedule" if option == "schedule" else "recipe-option"
            yield RecipeVariant(Finding(kind, f"no {option}"), replace(recipe, **absent))
    if recipe.schedule is not None:
        for says, step in _STEPS:
            stepped = _stepped(recipe.schedule, step)
            yield RecipeVariant(Finding("recipe-schedule", says), replace(recipe, schedule=stepped))
    if recipe.accumulate > 1:
        other = {"sum": "mean", "mean": "sum"}[recipe.accumulated]
        says = f"gradients accumulated as their {other}, not their {recipe.accumulated}"
        kind = "recipe-accumulation"
        yield RecipeVariant(Finding(kind, says), replace(recipe, accumulated=other))


_STEPS: tuple[tuple[str, Callable[[int], int]], ...] = (
    ("the schedule one update ahead", lambda t: t + 1),
    ("the schedule one update behind", lambda t: max(t - 1, 0)),
)


def _stepped(schedule: Callable[..., Any], step: Callable[[int], int]) -> Callable[..., Any]:
    """Return a scheduler that after update t has another's rates after update `step(t)`."""

    class Stepped:
        def __init__(self, optimizer: torch.optim.Optimizer):
            self._inner, self._done, self._at = schedule(optimizer), 0, 0
            self._advance()

        def step(self) -> None:
            self._done += 1
            self._advance()

        def _advance(self) -> None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns of a step before the first update
                while self._at < step(self._done):
                    self._inner.step()
                    self._at += 1

    return Stepped
