"""Run a port under each transform and compare it with a prepared reference, tensor by tensor."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from jax_attn.parity.checking.reference_errors import reference_failures
from jax_attn.parity.checking.reference_side import ReferenceSide
from jax_attn.parity.checking.state import StateFindings, States
from jax_attn.parity.checking.weights import ToTorch
from jax_attn.parity.judge.budget import Budget
from jax_attn.parity.judge.compare import BESIDE, TensorReport, Verdict
from jax_attn.parity.judge.finding import Finding, StandingNote, findings
from jax_attn.parity.judge.result import Result
from jax_attn.parity.judge.text import joined, quoted
from jax_attn.parity.run.asked_port import AskedPort
from jax_attn.parity.run.inputs_and_runs import COMPARED, RaisedError, Run, is_float, wide


def judge_port(
    prepared: ReferenceSide,
    port: AskedPort,
    transforms: Sequence[str],
    *,
    to_torch: ToTorch | None,
    beside: AskedPort | None = None,
    paired: frozenset[str] = frozenset(),
    passed_over: frozenset[str] = frozenset(),
    failures: Sequence[Finding] = (),
    doubts: Sequence[Finding] = (),
    notes: Sequence[Finding] = (),
    backend: str | None = None,
    level: str = "measured",
    name: str = "check",
    details: Mapping[str, str] | None = None,
) -> Result:
    """Run the port under each transform and compare it, tensor by tensor.

    to_torch: None if no table pairs the parameters; their gradients are then not compared.
    beside: for a port on a mesh, the port on a single device, with which it is compared as well,
        within the same budgets.
    paired: dotted paths of the port's other Variables that the table pairs. passed_over:
        parameters of the reference that the table passes over.
    backend: the backend in the result; None stands for the platform of JAX's default device.

    A transform under which the port raises an error is a failure, and the others are judged. Raises
    RaisedError if it raises one under all of them.
    """
    reports: list[TensorReport] = []
    states = States(prepared, port, to_torch, paired)
    state_findings = StateFindings(reports)
    is_finite: dict[str, bool] = {}
    raised: dict[str, RaisedError] = {}
    with port.full_precision(prepared.precision is None) as (platform, pinned):
        for transform in transforms:
            try:
                run = _run(prepared, port, transform, to_torch)
            except RaisedError as error:
                raised[transform] = error
                continue
            state_findings.notes |= dict.fromkeys(_other_dtypes(prepared, run))
            is_finite[transform] = all(np.isfinite(a).all() for a in wide(run.outputs).values())
            failed = set()
            is_paired = to_torch is not None
            for report in prepared.compare(run, transform, passed_over, is_paired=is_paired):
                by_rule, note = _by_torchs_rule(prepared, report, run)
                reports.append(by_rule)
                state_findings.notes |= dict.fromkeys(note)
                failed |= {report.kind} if by_rule.verdict is Verdict.FAIL else set()
            if failed:
                again = _run(prepared, port, transform, to_torch)
                other = other_numbers(run, again, prepared.budgets, transform)
                state_findings.failures |= dict.fromkeys(other)
            state_findings.failures |= dict.fromkeys(unlike_copies(run, transform))
            if beside is not None:
                one = _run(prepared, beside, transform, to_torch)
                reports += prepared.compare(run, f"{transform}{BESIDE}", passed_over, one)
            states.compare(run, transform, state_findings, outputs_fail="output" in failed)
    if raised and not is_finite:
        raise next(iter(raised.values()))
    of_errors = findings("raised", [f"{t}: {error}" for t, error in raised.items()])
    failures = (*of_errors, *state_findings.failures, *not_finite_under_some(is_finite), *failures)
    doubts = (*doubts, *state_findings.doubts)
    notes = (*notes, *state_findings.notes, *pinned)
    if state_findings.draws and any(r.verdict is Verdict.FAIL for r in reports):
        failures = (*findings("draws-random", [state_findings.draws]), *failures)
    elif state_findings.draws:
        notes = (*notes, Finding("draws-random", state_findings.draws))
    if near := prepared.near_decisions:
        passes = all(r.verdict is Verdict.PASS for r in reports)
        kind = "near-decision"
        notes = (*notes, *(StandingNote(kind, line) for line in near)) if passes else notes
        doubts = doubts if passes else (*doubts, *findings(kind, near))
    if not prepared.gradients:
        off = Finding("gradients-off", "gradients were not compared: gradients=False")
        notes = (*notes, off)
    if reports and all(r.verdict is Verdict.PASS and r.is_zero for r in reports):
        zero = "every compared tensor is zero, so other weights would give the same"
        doubts = (*doubts, Finding("all-zero", zero))
    return Result(
        dtype=prepared.dtype,
        backend=backend or platform,
        tensors=tuple(reports),
        failures=(*failures, *reference_failures(prepared)),
        doubts=tuple(doubts),
        notes=tuple(notes),
        level=level,
        name=name,
        details=dict(details or {}),
    )


def _run(prepared: ReferenceSide, port: AskedPort, transform: str, to_torch: ToTorch | None) -> Run:
    """Run the port once, and rename the gradients of its parameters to the reference's names.

    Without those of the reference's buffers, which a port may hold as parameters.
    """
    run = port.run(prepared.dtype, prepared.differentiated, transform)
    grads, names = to_torch(run.parameter_grads) if to_torch else {}, prepared.parameters
    compared = {
        name: grad
        for name, grad in grads.items()
        if name not in prepared.buffers and (names is None or name in names)
    }
    return replace(run, parameter_grads=compared)


def _other_dtypes(prepared: ReferenceSide, run: Run) -> Iterator[StandingNote]:
    """Yield a note on each output that one side returns in a finer dtype than the other."""
    for name, own in prepared.own.outputs.items():
        got = run.outputs.get(name, own).dtype
        if is_float(got) and is_float(own.dtype) and got != own.dtype:
            yield StandingNote(
                "output-dtype",
                f"output {name!r} is {own.dtype} in the reference and {got} in the port; both were "
                f"judged by the budget of {prepared.dtype}",
            )


def _by_torchs_rule(
    prepared: ReferenceSide, report: TensorReport, run: Run
) -> tuple[TensorReport, tuple[StandingNote, ...]]:
    """Return the report, without the padding row of an embedding if only that row fails.

    torch computes no gradient for that row.
    """
    kind, name = report.kind, report.name
    if kind != "gradient of parameter" or report.verdict is not Verdict.FAIL:
        return report, ()
    got, want = run.kinds[kind][name], prepared.exact.kinds[kind][name]
    row = prepared.padding_rows.get(name)
    if row is None or got.shape != want.shape:
        return report, ()
    without = got.copy()
    without[row] = want[row]
    other = prepared.judge_one(kind, name, report.transform, without)
    if other.verdict is Verdict.FAIL:
        return report, ()
    note = StandingNote(
        "padding-row",
        f"row {row} of grad {name}, its padding_idx, was not compared: torch computes no "
        "gradient for that row, but the port does, and an optimizer would move it; set this "
        "gradient to zero before an update",
    )
    return other, (note,)


def other_numbers(
    run: Run, again: Run, budgets: Mapping[str, Mapping[str, Budget]], transform: str
) -> tuple[Finding, ...]:
    """Return a failure if two runs of the same call differ in a tensor by more than its budget.

    Smaller differences are rounding, because some devices add up sums in another order each time.
    """
    moved = [
        f"{name}" if kind == "output" else f"{kind} {name}"
        for kind in COMPARED
        for name, first in run.kinds[kind].items()
        if _apart(first, again.kinds[kind].get(name), budgets[kind].get(name))
    ]
    if not moved:
        return ()
    failure = (
        f"{transform}: the port gives other numbers each time: two runs of the same module on the "
        f"same inputs differ in {quoted(moved)}; it may draw random numbers outside of nnx.Rngs, "
        "read the time, or keep state outside of its Variables"
    )
    return (Finding("other-numbers", failure),)


def unlike_copies(run: Run, transform: str) -> Iterator[Finding]:
    """Yield a failure if devices disagree on an array that should be replicated."""
    if run.unlike:
        yield Finding(
            "unlike-copies",
            f"{transform}: devices hold different numbers for {quoted(run.unlike)}, which should "
            "be the same on each; a sum over an axis of the mesh (jax.lax.psum) may be missing in "
            "a shard_map with check_vma=False",
        )


def not_finite_under_some(is_finite: Mapping[str, bool]) -> tuple[Finding, ...]:
    """Return a failure if outputs are finite under one transform and not under another.

    is_finite: whether all outputs are finite, by transform. They may differ because XLA:CPU rounds
    `fill * c - max` once, while eager operations round the product and the difference separately.
    """
    lost = [transform for transform, finite in is_finite.items() if not finite]
    if not lost or len(lost) == len(is_finite):
        return ()
    kept = joined([transform for transform in is_finite if transform not in lost])
    failure = (
        f"the port's outputs are finite under {kept} and not under {joined(lost)}: it takes "
        "another path there, or different rounding makes the same numbers overflow or divide by "
        "zero"
    )
    if "eager" not in lost:
        failure += (
            "; this is known to happen if the mask of a softmax adds a finite fill (`finfo.min`) "
            "that is scaled afterwards: in the compiled program, product and maximum are rounded "
            "differently, and a row in which every key is hidden may be lost; to avoid it, scale "
            "the scores before the mask is added"
        )
    return (Finding("finite-under-some", failure),)


def _apart(first: np.ndarray, second: np.ndarray | None, budget: Budget | None) -> bool:
    if second is None or first.shape != second.shape:
        return True
    fits = budget is not None and budget.element.shape == first.shape
    allowed = budget.element if budget is not None and fits else 0.0
    with np.errstate(invalid="ignore"):
        near = np.abs(first - second) <= allowed
    same = (first == second) | (np.isnan(first) & np.isnan(second))
    return not (near | same).all()
