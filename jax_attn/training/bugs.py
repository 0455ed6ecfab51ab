"""List what ports do wrong in a training: an option left out, or with another value.

Canaries ask whether the batches of a check would reveal that an option is left out; explanations
try each bug in the reference.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from jax_attn.parity.judge.finding import Finding
from jax_attn.training.recipe import Recipe
from jax_attn.training.reference_training import ReferenceTraining
from jax_attn.training.runs import Replay

Groups = Sequence[dict[str, Any]]
"""The param_groups of an optimizer."""


# --- what hides an option -------------------------------------------------------------------------


def gradients_of_updates(training: ReferenceTraining) -> Iterator[list[np.ndarray]]:
    """Yield the gradient of each update from identical gradients, tensor by tensor."""
    recipe, gradients = training.loop.recipe, training.gradients
    divisor = recipe.accumulate if recipe.accumulated == "mean" else 1
    for i in range(0, len(gradients), recipe.accumulate):
        batches = gradients[i : i + recipe.accumulate]
        yield [
            np.sum([np.float64(g[key]) for g in batches], axis=0) / divisor for key in batches[0]
        ]


def _largest_norm(training: ReferenceTraining) -> str:
    updates = list(gradients_of_updates(training))
    norm = max(math.sqrt(sum(np.square(g).sum() for g in update)) for update in updates)
    return f"the largest gradient norm of the first {len(updates)} updates is {norm:.2g}"


def _largest_element(training: ReferenceTraining) -> str:
    updates = list(gradients_of_updates(training))
    largest = max(np.abs(g).max() for update in updates for g in update)
    return f"the largest element of the first {len(updates)} gradients is {largest:.2g}"


def _too_few_updates(training: ReferenceTraining) -> str:
    return f"the rate hardly changes in {training.steps} updates"


def _too_small(training: ReferenceTraining) -> str:
    return f"it moves no parameter by more than {training.loop.dtype} rounding"


# --- options --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Option:
    """An option of a training: a field of the recipe, or an option in the optimizer's groups.

    Attributes:
      absent: its value when it is left out.
      usual: other values, of frameworks and papers.
      hidden_by: says why batches hide that it is left out.
      revealed_by: batches that reveal it.
      is_asked: whether the canaries of a check leave it out.
    """

    absent: Any
    usual: tuple[Any, ...] = ()
    hidden_by: Callable[[ReferenceTraining], str] = field(default=_too_small, repr=False)
    revealed_by: str = "a larger value, a larger rate, or more steps"
    is_asked: bool = True


OPTIONS: dict[str, Option] = {
    "clip_norm": Option(None, (), _largest_norm, "a clip_norm below that"),
    "clip_value": Option(None, (0.1, 0.5, 1.0, 5.0), _largest_element, "a clip_value below that"),
    "schedule": Option(None, (), _too_few_updates, "enough steps for the schedule to act"),
    "nesterov": Option(False, (True,)),
    "centered": Option(False, (True,)),
    "maximize": Option(False, (True,), is_asked=False),
    "decoupled_weight_decay": Option(False, (True,), is_asked=False),
    "weight_decay": Option(0.0, (1e-4, 1e-2)),
    "momentum": Option(0.0),
    "dampening": Option(0.0),
    "eps": Option(0.0, (1e-6, 1e-7, 1e-8, 1e-10, 1e-15)),
    "betas": Option((0.9, 0.999), ((0.9, 0.99), (0.9, 0.98), (0.9, 0.95)), is_asked=False),
    "alpha": Option(0.9, (0.99,), is_asked=False),
    "lr_decay": Option(0.0),
    "momentum_decay": Option(0.0, (4e-3,)),
}
"""Option -> its values, what hides it and what reveals it."""


def own_values(option: str, recipe: Recipe, groups: Groups) -> list[Any]:
    """Return the values that a training has of an option, without repeats."""
    if option in Recipe.__dataclass_fields__:
        return [getattr(recipe, option)]
    return list(dict.fromkeys(group[option] for group in groups if option in group))


def with_options(recipe: Recipe, **options: Any) -> Recipe:
    """Return the same recipe with other options.

    options: a field of `Recipe` replaces that field; any other name replaces the option of every
    param_group of the optimizer.
    """
    fields = {name: x for name, x in options.items() if name in Recipe.__dataclass_fields__}
    rest = {name: x for name, x in options.items() if name not in fields}
    return replace(recipe.with_options(**rest) if rest else recipe, **fields)


# --- bugs of a recipe -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Trial:
    """A changed recipe. scales: factors of the gradients, for each update; () for none."""

    recipe: Recipe
    scales: tuple[float, ...] = ()

    def replay(self, training: ReferenceTraining, seed: int | None) -> Replay:
        """Make the reference's updates from identical gradients by this recipe."""
        gradients: list[Any] = training.gradients
        if self.scales:
            each = np.repeat(self.scales, self.recipe.accumulate)
            pairs = zip(gradients, each, strict=True)
            gradients = [{k: np.float64(a) * scale for k, a in g.items()} for g, scale in pairs]
        return replace(training.loop, recipe=self.recipe).replay(gradients, seed)


@dataclass(frozen=True)
class RecipeBug:
    """A possible fault of a port's updates. says: the change in words, to follow "with"."""

    says: Finding | None
    trial: Trial


def recipe_bugs(recipe: Recipe, groups: Groups, factor: float) -> Iterator[RecipeBug]:
    """Yield changed recipes. factor: of the learning rate, found from the port's first update."""
    if abs(factor - 1) > 1e-6:
        rates = [factor * group["lr"] for group in groups]
        says = Finding("recipe-rate", f"a learning rate {factor:.6g} times as large")
        yield RecipeBug(says, Trial(_with_rates(recipe, rates)))
    for name, option in OPTIONS.items():
        own = own_values(name, recipe, groups)
        if name in Recipe.__dataclass_fields__:
            if own != [option.absent]:
                kind = "recipe-schedule" if name == "schedule" else "recipe-option"
                changed = with_options(recipe, **{name: option.absent})
                yield RecipeBug(Finding(kind, f"no {name}"), Trial(changed))
            else:
                for value in option.usual:
                    says = Finding("recipe-option", f"{name}={value}, which the reference lacks")
                    yield RecipeBug(says, Trial(with_options(recipe, **{name: value})))
            continue
        exchanged = [value[::-1] for value in own] if name == "betas" else []
        for value in dict.fromkeys((option.absent, *option.usual, *exchanged, *own)) if own else ():
            if own != [value]:
                yield _with_value(recipe, name, value, own)
    if recipe.schedule is not None:
        for words, step in _STEPS:
            says = Finding("recipe-schedule", words)
            yield RecipeBug(says, Trial(replace(recipe, schedule=_stepped(recipe.schedule, step))))
    if recipe.accumulate > 1:
        other = {"sum": "mean", "mean": "sum"}[recipe.accumulated]
        words = f"gradients accumulated as their {other}, not their {recipe.accumulated}"
        says = Finding("recipe-accumulation", words)
        yield RecipeBug(says, Trial(replace(recipe, accumulated=other)))


def _with_value(recipe: Recipe, option: str, value: Any, own: Sequence[Any]) -> RecipeBug:
    where = " in every group" if len(own) > 1 else ""
    words = f"{option}={value}{where} in place of {', '.join(map(str, own))}"
    return RecipeBug(
        Finding("recipe-option", words), Trial(with_options(recipe, **{option: value}))
    )


def _with_rates(recipe: Recipe, rates: Sequence[float]) -> Recipe:
    def changed(module: torch.nn.Module) -> torch.optim.Optimizer:
        optimizer = recipe.optimizer(module)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        return optimizer

    return replace(recipe, optimizer=changed)


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
