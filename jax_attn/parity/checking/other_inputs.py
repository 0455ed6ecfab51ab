"""Judge a port on inputs other than the given ones, for which the reference was asked before."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from jax_attn.parity.checking.reference_side import ReferenceSide
from jax_attn.parity.judge.compare import Verdict, rms
from jax_attn.parity.judge.finding import Finding, Findings, findings
from jax_attn.parity.judge.text import joined, quoted
from jax_attn.parity.run.asked_port import AskedPort
from jax_attn.parity.run.inputs_and_runs import Arrays, Inputs, wide

# --- integers that a port could ignore unseen -----------------------------------------------------


@dataclass(frozen=True)
class OtherIntegers:
    """The reference on other values of the integers that a port might ignore.

    together: with other values of all of them; None if there are none, or the reference raises an
    error. each: input's name -> with other values of only that input. notes: inputs not varied.

    In a narrow dtype each has an `again`, for a port that is judged by either budget.
    """

    notes: tuple[Finding, ...] = ()
    together: ReferenceSide | None = None
    each: Mapping[str, ReferenceSide] = field(default_factory=dict)

    def by_either(self) -> "OtherIntegers":
        """In a narrow dtype, return the same with both budgets."""
        together = self.together and self.together.by_either
        each = {name: side.by_either for name, side in self.each.items()}
        return OtherIntegers(self.notes, together, each)


def ignored_integers(
    others: OtherIntegers, prepared: ReferenceSide, port: AskedPort, transforms: Sequence[str]
) -> Findings:
    """Judge the port, forward only, on other values of each integer input that it might ignore.

    By either budget, if `prepared` has both.
    """
    if others.together is None:
        return Findings(notes=others.notes)
    others = others if prepared.first is prepared else others.by_either()
    # Eager runs reuse the compiled operations, because the shapes are the same.
    transform = "eager" if "eager" in transforms else transforms[0]
    try:
        failures = findings("input-ignored", _failures(others, port, transform))
        return Findings(failures, notes=others.notes)
    except _RefusedError as error:
        return Findings(notes=(*others.notes, not_checked(others.each, str(error))))


def not_checked(names: Iterable[str], why: str) -> Finding:
    """Return a note on integer inputs that a port may or may not read."""
    listed = joined([repr(name) for name in names])
    note = f"whether the port reads input {listed} was not checked: {why}"
    return Finding("input-not-varied", note)


def _failures(others: OtherIntegers, port: AskedPort, transform: str) -> Iterator[str]:
    """Yield why the port fails on all of them together, by input if some input alone fails too."""
    assert others.together is not None
    together = _reasons(others.together, port, transform)
    each = {
        name: _reasons(prepared, port, transform)
        for name, prepared in others.each.items()
        if together
    }
    by_name = {repr(name): reasons for name, reasons in each.items() if reasons}
    all_of_them = joined([repr(name) for name in others.each])
    for names, reasons in (by_name or {f"{all_of_them} together": together}).items():
        yield from (f"with other values of {names}: {reason}" for reason in reasons)


class _RefusedError(Exception):
    """The port raises an error on the other values."""


def _reasons(prepared: ReferenceSide, port: AskedPort, transform: str) -> list[str]:
    """Return why the port differs from the reference on these inputs."""
    with port.full_precision(True):
        run = port.tried(prepared.dtype, prepared.inputs, transform)
    if isinstance(run, str):
        raise _RefusedError(f"with other values the port raises {run}")
    return [
        f"{report.transform} {report.label}: {reason}"
        for report in prepared.compare(run, transform)
        if report.verdict is Verdict.FAIL
        for reason in report.reasons
    ]


# --- a port that returns its first outputs again --------------------------------------------------


class OtherInputs(NamedTuple):
    """Inputs of the same shapes with different outputs; outputs: the reference's, in float64."""

    inputs: Inputs
    outputs: Arrays


def kept_outputs(
    others: OtherInputs | None, prepared: ReferenceSide, port: AskedPort
) -> tuple[Finding, ...]:
    """Return a failure if the port repeats its first outputs on inputs that change the reference's.

    Runs only eagerly: a compiled program keeps no outputs, and the operations are compiled already.
    """
    if others is None:
        return ()
    exact = prepared.exact.kinds["output"]
    with port.full_precision(prepared.precision is None):
        run = port.tried(prepared.dtype, others.inputs, "eager")
    if isinstance(run, str):  # an error of the port: the check promises nothing on these inputs
        return ()
    kept = [
        name
        for name, got in wide(run.outputs).items()
        if name in exact
        and got.shape == exact[name].shape == (other := others.outputs[name]).shape
        and prepared.judge_one("output", name, "kept", other).verdict is Verdict.FAIL
        and prepared.judge_one("output", name, "kept", got).verdict is not Verdict.FAIL
        and rms(got - exact[name]) < rms(got - other)
    ]
    if not kept:
        return ()
    failure = (
        f"eager: on other inputs of the same shapes the port gives {quoted(kept)} as on these, and "
        "the reference does not: does the port keep results outside its Variables?"
    )
    return (Finding("outputs-kept", failure),)
