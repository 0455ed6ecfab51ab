"""Explain why a port does not train as its reference: gradients, then updates, then the free run.

Wrong gradients are explained as those of a check are. Wrong updates are compared with those that
the reference makes from the same gradients under other recipes: one that gives the port's updates
and optimizer state, within rounding, is the cause.
"""

import copy
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain

import numpy as np
from rich.console import Group
from rich.text import Text

from jax_attn.parity.explaining.explain import Ended, regions_of
from jax_attn.parity.explaining.explanation import Explanation
from jax_attn.parity.judge.budget import PRECISIONS
from jax_attn.parity.judge.compare import TensorReport, Verdict
from jax_attn.parity.judge.finding import Finding
from jax_attn.parity.judge.result import Result
from jax_attn.parity.run.inputs_and_runs import Inputs
from jax_attn.parity.run.port import Port, full_precision
from jax_attn.parity.run.reference import Reference
from jax_attn.training.bugs import RecipeBug, recipe_bugs
from jax_attn.training.fitted import fitted_bugs
from jax_attn.training.port_loop import PortLoop, PortTraining
from jax_attn.training.reference_training import (
    ReferenceTraining,
    Runs,
    compared,
)
from jax_attn.training.runs import Label, Replay, master_dtype

_MOST_UPDATES = 12
"""The largest number of updates that are made again to find what acts late."""

_NEAR = 0.01
"""A recipe is rejected without a budget if a tensor is off by more than this part of its norm."""


@dataclass(frozen=True)
class TrainingExplanation(Explanation):
    """The first difference between a training and its reference's, and its causes.

    Attributes:
      result, regions: as in an `Explanation`; the regions of the first batch's gradients.
      first_wrong: the first wrong tensor of the training; None if only weights or states differ.
      causes: explanations of wrong updates, to follow "with": "weight_decay=0.0 in place of 0.01".
        Each has a `kind` that begins with "recipe".
    """

    first_wrong: TensorReport | None = None
    causes: tuple[Finding, ...] = ()

    @property
    def sentence(self) -> str:
        """The finding in one sentence."""
        if unlike := [str(x) for x in self.result.failures if x.kind in _BEFORE]:
            return f"Both sides differ before the first update: {unlike[0]}."
        if self.regions or self.verdict is Verdict.PASS:
            return super().sentence
        if self.causes:
            return f"The port updates its parameters as the reference would with {self.causes[0]}."
        if (first := self.first_wrong) is None:
            return f"The check is {self.verdict}, and no tensor of the training is wrong."
        return f"{_RIGHT_BEFORE[_stage(first)]} {first.transform}: {first.name}."

    @property
    def _finding(self) -> Group:
        others = [Text(f"  cause   {cause}") for cause in self.causes]
        return Group(super()._finding, *others)

    def to_json(self) -> dict:
        """Return plain data for JSON, as `Explanation` does, with the causes of wrong updates."""
        first = None if self.first_wrong is None else self.first_wrong.as_dict()
        causes = [{"kind": cause.kind, "sentence": str(cause)} for cause in self.causes]
        return super().to_json() | {"first_wrong": first, "causes": causes}


_BEFORE = ("weights-differ", "optimizer-state-differs")
_GRADIENTS, _UPDATES, _FREE_RUN = range(3)
_RIGHT_BEFORE = (
    "The first batch's gradients are wrong, first in",
    "The gradients are right. From the reference's own gradients, the updates first differ in",
    "The gradients are right, and so are the updates from the reference's own. The free run first "
    "differs in",
)


def _stage(tensor: TensorReport) -> int:
    if tensor.kind == "gradient of parameter":
        return _GRADIENTS
    return _UPDATES if tensor.transform.startswith("update") else _FREE_RUN


def explain_training(
    result: Result, reference: ReferenceTraining, port: PortTraining
) -> TrainingExplanation:
    """Find where a training first differs from its reference's, and what explains it.

    An interruption ends the search; what it had found is kept.

    result: that of `check_training`.
    """
    failed = [t for t in result.tensors if t.verdict is Verdict.FAIL]
    first = min(failed, key=_stage, default=None)
    stages = set(map(_stage, failed))
    wrong = {f"parameter {t.name}" for t in failed if _stage(t) == _GRADIENTS}
    dtype = reference.loop.dtype
    found = regions_of(*_first_batch(reference, port.loop), wrong, dtype) if wrong else Ended(())
    causes: tuple[Finding, ...] = ()
    stopped = found.stopped
    if stopped != "interrupted":
        try:
            causes = _causes_after(stages, reference, port)
        except KeyboardInterrupt:
            stopped = "interrupted"
    return TrainingExplanation(result, found.regions, first, causes, stopped=stopped)


def _causes_after(
    stages: Collection[int], reference: ReferenceTraining, port: PortTraining
) -> tuple[Finding, ...]:
    """Return the causes of wrong updates. stages: those of which a tensor is wrong."""
    is_late = set(stages) == {_FREE_RUN}  # an option acts later, such as a step of a schedule
    if is_late:
        reference = reference.replaying(min(reference.steps, _MOST_UPDATES))
    return tuple(_causes(reference, port)) if is_late or _UPDATES in stages else ()


def _first_batch(reference: ReferenceTraining, port: PortLoop) -> tuple[Reference, Port]:
    """Return both sides of a check whose output is the loss of the first batch."""
    loop, inputs = reference.loop, Inputs((), dict(reference.loop.batches[0]))
    return (
        Reference(loop.module, lambda module, **batch: loop.loss(module, batch), inputs),
        Port(port.module, lambda module, **batch: port.loss(module, batch), inputs),
    )


def _causes(reference: ReferenceTraining, port: PortTraining) -> Iterator[Finding]:
    """Yield the first recipe under which the reference makes the port's updates, if any."""
    loop = reference.loop
    gradients = [loop.to_paths(by_key) for by_key in reference.gradients]
    with full_precision():
        try:  # in float64, where rounding in the port's optimizer hides no other cause
            ours = port.replay(gradients, "float64")
        except Exception:  # the user's transformation may compute only in its own dtype
            ours = port.replay(gradients)
    groups = loop.recipe.optimizer(copy.deepcopy(loop.module)).param_groups
    factor = _factor(ours.moved[1], reference.replays.exact.moved[1])
    options = recipe_bugs(loop.recipe, groups, factor)
    for bug in chain(options, fitted_bugs(reference, ours)):
        if bug.says and _gives(reference, bug, ours):
            yield bug.says
            return


def _factor(ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray]) -> float:
    """Return the factor of the port's first update to the reference's, by least squares."""
    square = sum(float(np.vdot(a, a)) for a in theirs.values())
    product = sum(float(np.vdot(a, ours[path])) for path, a in theirs.items())
    return product / square if square else 1.0


def _gives(reference: ReferenceTraining, bug: RecipeBug, ours: Replay) -> bool:
    """Return whether another recipe gives the reference the port's updates and state."""

    replay = partial(bug.trial.replay, reference)
    try:
        if not _is_near(ours.tensors(), replay(0).tensors()):
            return False
        runs = Runs.of(replay, reference.perturbed_runs)
    except (ValueError, RuntimeError):  # torch refuses this combination of options
        return False
    precision = PRECISIONS[master_dtype(reference.loop.dtype)]
    reports = compared(reference, runs, ours, precision)
    return all(report.verdict is Verdict.PASS for report in reports)


def _is_near(ours: Mapping[Label, np.ndarray], theirs: Mapping[Label, np.ndarray]) -> bool:
    return all(
        float(np.linalg.norm(ours[label] - a)) <= _NEAR * float(np.linalg.norm(a))
        for label, a in theirs.items()
        if label in ours
    )
