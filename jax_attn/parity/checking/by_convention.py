"""Failures of a port that differs from its reference only by a convention."""

from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from jax_attn.parity.checking.reference_side import NotAskedError, ReferenceSide
from jax_attn.parity.checking.weights import ToTorch
from jax_attn.parity.judge.budget import PRECISIONS
from jax_attn.parity.judge.compare import BESIDE, ROUNDINGS, Verdict
from jax_attn.parity.judge.finding import Finding
from jax_attn.parity.judge.result import Result
from jax_attn.parity.run.asked_port import AskedPort
from jax_attn.parity.run.inputs_and_runs import Arrays, Run
from jax_attn.transfer.arrays import same_bits


@dataclass(frozen=True)
class Convention:
    """Another convention than the reference's, of no bug's kind.

    kind: the kind of the finding. sentence: what it gives, and where. run: the reference's run by
    this convention, without the tensors that equal the oracle's.
    """

    kind: str
    sentence: str
    run: Run

    @classmethod
    def of(cls, kind: str, sentence: str, run: Run, exact: Run) -> Self:
        """Take what a run by this convention has apart from the oracle's run, bit for bit."""
        outputs, of_inputs, of_parameters = (
            {k: a for k, a in ours.items() if k not in theirs or not same_bits(a, theirs[k])}
            for ours, theirs in zip(_parts(run), _parts(exact), strict=True)
        )
        return cls(kind, sentence, Run(outputs, of_inputs, of_parameters))

    def whole(self, exact: Run) -> Run:
        """Return the run by this convention with the tensors that equal the oracle's."""
        outputs, of_inputs, of_parameters = (
            {**theirs, **ours} for ours, theirs in zip(_parts(self.run), _parts(exact), strict=True)
        )
        return Run(outputs, of_inputs, of_parameters)


def _parts(run: Run) -> tuple[Arrays, Arrays, Arrays]:
    return run.outputs, run.input_grads, run.parameter_grads


_OF_RUNS = ("output", "gradient of input", "gradient of parameter")


def with_convention(
    prepared: ReferenceSide, port: AskedPort, to_torch: ToTorch | None, result: Result
) -> Result:
    """Return a result whose failure names the convention, if the port differs only by it."""
    failed = [r for r in result.tensors if r.verdict is Verdict.FAIL]
    if not failed or any(r.transform.endswith(BESIDE) or r.kind not in _OF_RUNS for r in failed):
        return result
    try:
        conventions: tuple[Convention, ...] = prepared.answer("conventions")
    except NotAskedError:
        return result
    if not conventions:
        return result
    with port.full_precision(prepared.precision is None):
        run = port.run(prepared.dtype, prepared.differentiated, failed[0].transform)
    grads = to_torch(run.parameter_grads) if to_torch else {}
    run = replace(run, parameter_grads=grads)
    for other in conventions:
        whole = other.whole(prepared.exact)
        if all(_agrees(prepared, run, whole, r.kind, r.name) for r in failed):
            sentence = (
                "the tensors that fail differ only by a convention, since the reference has the "
                f"port's with {other.sentence}"
            )
            return replace(result, failures=(Finding(other.kind, sentence), *result.failures))
    return result


def _agrees(prepared: ReferenceSide, run: Run, other: Run, kind: str, name: str) -> bool:
    """Judge a tensor by another convention.

    The budgets are those of the reference, which are 0 where it only selects numbers, or where its
    own is exactly 0. There, what divides a number into shares may still round each of them.
    """
    got = run.kinds[kind].get(name)
    if got is None or got.shape != (want := other.kinds[kind][name]).shape:
        return False
    bare = prepared.exact.kinds[kind][name] == 0
    of_share = ROUNDINGS * PRECISIONS[prepared.dtype].store * np.abs(want)
    allowed = np.maximum(of_share, bare * prepared.budgets[kind][name].rms)
    got = np.where(np.abs(got - want) <= allowed, want, got)
    return prepared.judge_one(kind, name, "convention", got, other).verdict is not Verdict.FAIL
