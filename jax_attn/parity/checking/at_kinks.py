"""Gradients that are wrong only because JAX's derivative at a kink is another than torch's."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from jax_attn.parity.checking.reference_side import NotAskedError, ReferenceSide
from jax_attn.parity.checking.weights import ToTorch
from jax_attn.parity.judge.compare import Verdict
from jax_attn.parity.judge.finding import Finding
from jax_attn.parity.judge.result import Result
from jax_attn.parity.run.inputs_and_runs import Run
from jax_attn.parity.run.port import Port, full_precision


@dataclass(frozen=True)
class Kinks:
    """A reference's numbers that lie exactly where a derivative jumps.

    said: for each operator at whose kink numbers lie, what is at which lines. runs: operators, with
        spaces between them -> the reference's run with JAX's derivatives of these.
    """

    said: Mapping[str, str]
    runs: Mapping[str, Run]


def with_kinks(
    prepared: ReferenceSide, port: Port, to_torch: ToTorch | None, result: Result
) -> Result:
    """Return a result whose failure by gradients alone names the convention, if it is only that."""
    failed = [r for r in result.tensors if r.verdict is Verdict.FAIL]
    if not failed or any(not r.kind.startswith("gradient") for r in failed):
        return result
    try:
        found = prepared.answer("kinks")
    except NotAskedError:
        return result
    if not found.runs:
        return result
    transform = failed[0].transform
    with full_precision(prepared.precision is None):
        run = port.run(prepared.dtype, prepared.differentiated, transform)
    grads = to_torch(run.parameter_grads) if to_torch else {}
    run = replace(run, parameter_grads=grads)
    for names, other in found.runs.items():
        if all(_agrees(prepared, run, other, r.kind, r.name) for r in failed):
            where = "; ".join(found.said[name] for name in names.split())
            sentence = (
                "the gradients that fail differ only by a convention, since the reference has the "
                f"port's with JAX's derivatives: {where}"
            )
            return replace(result, failures=(Finding("kink", sentence), *result.failures))
    return result


def _agrees(prepared: ReferenceSide, run: Run, other: Run, kind: str, name: str) -> bool:
    got = run.kinds[kind].get(name)
    return got is not None and (
        prepared.judge_one(kind, name, "kink", got, other).verdict is not Verdict.FAIL
    )
