"""Compare the port's runs with the reference's: one report a tensor, within its budget."""

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from jax_attn.parity.judge.budget import PRECISIONS, Budget, Precision
from jax_attn.parity.judge.compare import TensorReport, judge
from jax_attn.parity.training.reference_training import Kind, ReferenceTraining, Runs
from jax_attn.parity.training.runs import MOMENT_FIELDS, FreeRun, Replay, master_dtype


def missing_moments(reference: ReferenceTraining, port: Replay) -> list[str]:
    """Moments that torch keeps and the port's optimizer does not."""
    return [
        f"optimizer state: torch keeps {name} of {path}, the port's optimizer has none"
        for name, by_path in reference.replays.own.moments.items()
        if name in MOMENT_FIELDS
        for path in by_path
        if path not in port.moments.get(name, {})
    ]


def compare_replay(reference: ReferenceTraining, port: Replay) -> Iterator[TensorReport]:
    """After one update and after the last, from identical gradients: how far parameters moved;
    and the optimizer's state, as far as the port's has it."""
    precision = PRECISIONS[master_dtype(reference.loop.dtype)]
    return _reports(reference.replays, port, precision, reference.idle)


def compare_free_run(reference: ReferenceTraining, port: FreeRun) -> Iterator[TensorReport]:
    """The first gradients; losses and how far parameters moved, on the way and at the end."""
    precision = PRECISIONS[reference.loop.dtype]
    return _reports(reference.free_runs, port, precision, reference.idle)


def _reports(
    runs: Runs[Kind], port: Kind, precision: Precision, idle: frozenset[str]
) -> Iterator[TensorReport]:
    """idle: parameters that rounding alone moves: the spread is all that holds their drift."""
    ours, own = port.tensors(), runs.own.tensors()
    perturbed = [run.tensors() for run in runs.perturbed]
    for label, exact in runs.exact.tensors().items():
        if label.moved is None and label not in ours:
            continue  # a moment that the port's optimizer does not keep
        want = _wide(exact)
        budget = Budget.of(want, [_wide(run[label]) for run in perturbed], precision)
        if label.moved in idle:
            budget = replace(budget, zero=math.inf)
        got, torchs = _wide(ours[label]), _wide(own[label])
        names = {"kind": label.kind, "name": label.name, "transform": label.transform}
        yield judge(want, got, torchs, budget, **names)


def _wide(a: np.ndarray) -> np.ndarray:
    return np.asarray(a).astype(np.float64)
