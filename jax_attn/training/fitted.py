"""Find by least squares the recipe that makes a port's updates: rates, clipping, weight decay.

The unknowns are a factor for each update, of the learning rate or of the gradient, and the weight
decay of each parameter. The reference's replays in float64 are differentiated numerically by them
(Gauss-Newton); a factor concerns all parameters, a decay only its own.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from jax_attn.parity.judge.finding import Finding
from jax_attn.parity.judge.text import joined, quoted
from jax_attn.training.bugs import RecipeBug, Trial, gradients_of_updates
from jax_attn.training.optimizers.schedules import learning_rates
from jax_attn.training.recipe import Recipe
from jax_attn.training.reference_training import ReferenceTraining
from jax_attn.training.runs import Arrays, Replay

_ITERATIONS = 12
_STEP = 1e-4
"""By how much an unknown is changed to differentiate: float64 keeps half of its digits."""
_SAME, _NONE = 1e-4, 1e-6
"""Fitted numbers with a smaller relative difference are one number; a smaller number is 0."""

Decays = Mapping[str, float]
"""torch key -> weight decay."""
Factors = np.ndarray
"""A factor for each update, of its learning rate or of its gradient."""

_TORCHS_EPS = 1e-6
"""What `torch.nn.utils.clip_grad_norm_` adds to the norm."""

_SHOWN = 5
"""The number of updates whose rates are shown."""


def fitted_bugs(reference: ReferenceTraining, ours: Replay) -> Iterator[RecipeBug]:
    """Yield the recipes that explain a port's updates best, with all that they change in words."""
    own = reference.loop.recipe
    for recipe, way in ((own, ""), (decoupled(own), _way(reference))):
        for family, described in ((_scaled, _as_clipping), (_rated, _as_rates)):
            try:
                factors, fitted = _fit(reference, recipe, family, ours)
            except (ValueError, RuntimeError, np.linalg.LinAlgError):  # torch refuses the recipe
                continue
            before = _own_decays(reference, recipe)
            decays = _rounded(before, fitted)
            if way and not any(decays.values()):
                continue
            bug = described(reference, with_decays(recipe, decays), factors)
            if bug is None:
                continue
            parts = (way, *_of_decays(reference, before, decays), bug.says)
            words = [str(part) for part in parts if part]
            if words:
                kind = bug.says.kind if bug.says and len(words) == 1 else "recipe-option"
                yield replace(bug, says=Finding(kind, joined(words)))


# --- least squares --------------------------------------------------------------------------------


def _fit(
    reference: ReferenceTraining,
    recipe: Recipe,
    family: Callable[[Recipe, Factors], Trial],
    ours: Replay,
) -> tuple[Factors, Decays]:
    """Return the factors, and the decays that show, of the replay that is nearest to the port's."""
    target = _by_key(reference, ours)
    sizes = {key: [np.linalg.norm(a) or 1.0 for a in parts] for key, parts in target.items()}

    def vectors(replay: Replay) -> dict[str, np.ndarray]:
        by_key = _by_key(reference, replay)
        return {
            key: np.concatenate([a.ravel() / s for a, s in zip(by_key[key], each, strict=True)])
            for key, each in sizes.items()
        }

    def at(factors: Factors, decays: Decays) -> dict[str, np.ndarray]:
        return vectors(family(with_decays(recipe, decays), factors).replay(reference, 0))

    wanted, factors = vectors(ours), np.ones(len(ours.moved))
    decays = _own_decays(reference, recipe)
    shown: dict[str, float] = {}
    for _ in range(_ITERATIONS):
        here = at(factors, decays)
        left = {key: wanted[key] - a for key, a in here.items()}
        by_factor = [
            _slopes(here, at(factors + _STEP * unit, decays)) for unit in np.eye(len(factors))
        ]
        more = {key: decay + _STEP for key, decay in decays.items()}
        step, shown = _solved(left, by_factor, _slopes(here, at(factors, more)))
        factors = factors + step
        decays = {key: decay + shown.get(key, 0.0) for key, decay in decays.items()}
        if np.abs([*step, *shown.values()]).max(initial=0.0) < _NONE**2:
            break
    return factors, {key: decays[key] for key in shown}


def _by_key(reference: ReferenceTraining, replay: Replay) -> dict[str, list[np.ndarray]]:
    """Return all that a replay shows of each parameter that the table reads, by torch key."""
    paths = reference.loop.to_paths
    moments = (replay.moments.get(name, {}) for name in reference.replays.own.moments)
    parts = [paths.by_key(arrays) for arrays in (*replay.moved.values(), *moments)]
    return {key: [part[key] for part in parts] for key in parts[0]}


def _slopes(here: Arrays, there: Arrays) -> dict[str, np.ndarray]:
    return {key: (there[key] - a) / _STEP for key, a in here.items()}


def _solved(
    left: Arrays, by_factor: Sequence[Arrays], by_decay: Arrays
) -> tuple[np.ndarray, dict[str, float]]:
    """Return one step of each unknown; only of decays that act on their parameter."""
    acts = {key: a @ a for key, a in by_decay.items()}
    largest = max(acts.values(), default=0.0)
    acts = {key: square for key, square in acts.items() if square > 1e-12 * largest}

    def apart(arrays: Arrays) -> np.ndarray:
        """Return what decays cannot change, as one vector."""
        return np.concatenate(
            [
                a - by_decay[key] * (by_decay[key] @ a) / acts[key] if key in acts else a
                for key, a in arrays.items()
            ]
        )

    step = np.linalg.lstsq(np.stack([*map(apart, by_factor)], 1), apart(left), rcond=1e-12)[0]
    decays = {}
    for key, square in acts.items():
        rest = left[key] - sum(u * a[key] for u, a in zip(step, by_factor, strict=True))
        decays[key] = float(by_decay[key] @ rest / square)
    return step, decays


# --- recipes of given unknowns --------------------------------------------------------------------


def _scaled(recipe: Recipe, factors: Factors) -> Trial:
    """Return a recipe without clipping by norm, the gradient of each update times its factor."""
    return Trial(replace(recipe, clip_norm=None), tuple(factors))


def _rated(recipe: Recipe, factors: Factors) -> Trial:
    """Return a recipe with the scheduled rate of each update times its factor.

    An update whose scheduled rates are all 0 has the optimizer's own rates times its factor.
    """

    class Rates:
        def __init__(self, optimizer: torch.optim.Optimizer):
            self._groups, self._left = optimizer.param_groups, iter(map(float, factors))
            self._own = [float(group["lr"]) for group in self._groups]
            self._set(self._own)  # numbers: a scheduler fills a tensor in place
            self._inner = recipe.schedule(optimizer) if recipe.schedule else None
            self._multiply()

        def step(self) -> None:
            self._set(self._scheduled)  # a scheduler may go on from the last rate
            if self._inner is not None:
                self._inner.step()
            self._multiply()

        def _multiply(self) -> None:
            self._scheduled = [float(group["lr"]) for group in self._groups]
            factor = next(self._left, 1.0)
            rates = self._scheduled if any(self._scheduled) else self._own
            self._set([rate * factor for rate in rates])

        def _set(self, rates: Sequence[float]) -> None:
            for group, rate in zip(self._groups, rates, strict=True):
                group["lr"] = rate

    return Trial(replace(recipe, schedule=Rates))


def with_decays(recipe: Recipe, decays: Decays) -> Recipe:
    """Return a recipe in which each parameter has its own weight decay."""

    def changed(module: torch.nn.Module) -> torch.optim.Optimizer:
        optimizer, groups = recipe.optimizer(module), []
        key = {id(p): name for name, p in module.named_parameters()}
        for group in optimizer.param_groups:
            by_decay: dict[float, list[torch.nn.Parameter]] = {}
            for p in group["params"]:
                by_decay.setdefault(decays[key[id(p)]], []).append(p)
            groups += [group | {"params": ps, "weight_decay": d} for d, ps in by_decay.items()]
        optimizer.param_groups[:] = groups
        return optimizer

    return replace(recipe, optimizer=changed)


def decoupled(recipe: Recipe) -> Recipe:
    """Return a recipe whose decay is coupled to the gradient if it was not, and the reverse."""

    def changed(module: torch.nn.Module) -> torch.optim.Optimizer:
        optimizer = recipe.optimizer(module)
        if any("decoupled_weight_decay" in group for group in optimizer.param_groups):
            for group in optimizer.param_groups:
                group["decoupled_weight_decay"] = not group["decoupled_weight_decay"]
        else:
            optimizer.register_step_pre_hook(_decay_apart)
        return optimizer

    return replace(recipe, optimizer=changed)


def _decay_apart(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Move the parameters by their decay alone, as AdamW does, and take it out of the update."""
    for group in optimizer.param_groups:
        group["apart"] = group.get("apart", 0.0) or group["weight_decay"]
        group["weight_decay"] = 0.0
        for p in group["params"]:
            p.data.mul_(1 - group["lr"] * group["apart"])


# --- words ----------------------------------------------------------------------------------------


def _groups(reference: ReferenceTraining, recipe: Recipe) -> list[dict[str, Any]]:
    return recipe.optimizer(copy.deepcopy(reference.loop.module)).param_groups


def _own_decays(reference: ReferenceTraining, recipe: Recipe) -> dict[str, float]:
    """Return the weight decay of each parameter that the optimizer holds."""
    module = copy.deepcopy(reference.loop.module)
    key = {id(p): name for name, p in module.named_parameters()}
    groups = recipe.optimizer(module).param_groups
    return {
        key[id(p)]: float(group.get("weight_decay", 0.0))  # Rprop has none
        for group in groups
        for p in group["params"]
    }


def _rounded(own: Decays, fitted: Decays) -> dict[str, float]:
    """Return the decays that are meant by fitted ones: the own, 0, or a common number.

    A parameter whose decay does not show, such as one of zeros, is taken to be like the others if
    the reference decays it like them; otherwise it keeps its own.
    """
    decays: dict[str, float] = {}
    for key, decay in fitted.items():
        known = (own[key], 0.0, *decays.values())
        meant = (x for x in known if abs(decay - x) <= max(_SAME * abs(x), _NONE))
        decays[key] = next(meant, float(f"{decay:.6g}"))
    pairs = {(own[key], decay) for key, decay in decays.items()}
    meant_by = dict(pairs) if len(pairs) == 1 else {}
    return {key: decays.get(key, meant_by.get(before, before)) for key, before in own.items()}


def _of_decays(reference: ReferenceTraining, own: Decays, decays: Decays) -> list[str]:
    """Say which parameters decay otherwise, for each pair of values."""
    changed: dict[tuple[float, float], list[str]] = {}
    for key, decay in decays.items():
        if decay != own[key]:
            changed.setdefault((decay, own[key]), []).append(key)
    parameters = reference.loop.module.named_parameters()
    ranks = {key: p.ndim for key, p in parameters if key in own}
    named = {
        "": set(ranks),
        " of all but matrices": {key for key, rank in ranks.items() if rank < 2},
        " of matrices": {key for key, rank in ranks.items() if rank > 1},
    }

    def where(keys: list[str]) -> str:
        return next((x for x, every in named.items() if {*keys} == every), f" of {quoted(keys, 3)}")

    return [
        f"weight_decay={decay}{where(keys)} in place of {before}"
        for (decay, before), keys in changed.items()
    ]


def _way(reference: ReferenceTraining) -> str:
    """Say how the decay of `decoupled` differs."""
    name = "decoupled_weight_decay"
    own = [group[name] for group in _groups(reference, reference.loop.recipe) if name in group]
    if own:
        return f"{name}={not own[0]} in place of {own[0]}"
    return "a weight decay apart from the gradient"


def _as_clipping(
    reference: ReferenceTraining, recipe: Recipe, factors: Factors
) -> RecipeBug | None:
    """Return the clipping by norm that scales gradients so: the own, or another; None if none."""
    own = recipe.clip_norm
    norms = np.array(
        [math.sqrt(sum(np.square(g).sum() for g in gs)) for gs in gradients_of_updates(reference)]
    )

    def off(expected: Factors) -> float:
        return float(np.abs(factors / expected - 1).max())

    if own is not None:
        torchs, plain = (np.minimum(1.0, own / (norms + eps)) for eps in (_TORCHS_EPS, 0.0))
        # Factors that lie in the middle, or further off, do not tell the two apart.
        if off(plain) < np.abs(torchs / plain - 1).max() / 2:
            words = f"clip_norm={own} without the 1e-6 that torch adds to the norm"
            return RecipeBug(Finding("recipe-option", words), _scaled(recipe, plain))
        if off(torchs) <= _SAME:
            return RecipeBug(None, Trial(recipe))
    is_clipped = factors < 1 - _NONE
    if not is_clipped.any():
        says = Finding("recipe-option", "no clip_norm") if own else None
        is_whole = np.abs(factors - 1).max() <= _NONE
        return RecipeBug(says, _scaled(recipe, np.ones_like(factors))) if is_whole else None
    limits = (factors * norms)[is_clipped]
    limit = float(f"{limits.mean():.6g}")
    expected = np.minimum(1.0, limit / norms)
    if off(expected) > _SAME:
        return None
    words = f" in place of {own}" if own else ", which the reference lacks"
    says = Finding("recipe-option", f"clip_norm={limit}{words}")
    return RecipeBug(says, _scaled(recipe, expected))


def _as_rates(reference: ReferenceTraining, recipe: Recipe, factors: Factors) -> RecipeBug:
    """Return the rates in words: a factor of the reference's, or another schedule."""
    acts: np.ndarray = np.ones(len(factors), bool)
    if recipe.schedule is not None:
        optimizer = recipe.optimizer(copy.deepcopy(reference.loop.module))
        rates, *_ = learning_rates(recipe.schedule(optimizer), len(factors))
        acts = np.asarray(rates.any(axis=0))
    share = factors[acts][0] if acts.any() else 1.0
    if np.abs(factors - share * acts).max() > _NONE * abs(share):
        told = joined([f"{factor:.4g}" for factor in factors[:_SHOWN]])
        has = "another schedule" if recipe.schedule else "a schedule, which the reference lacks"
        words = f"{has}: its rates are {told} times the reference's in the first updates"
        return RecipeBug(Finding("recipe-schedule", words), _rated(recipe, factors))
    factor = float(f"{share:.6g}")
    if factor == 1:
        return RecipeBug(None, Trial(recipe))
    says = Finding("recipe-rate", f"a learning rate {factor:.6g} times as large")
    return RecipeBug(says, _rated(recipe, factor * acts))
