"""Compare the state that a call changes on both sides, and the outputs of a second call from it.

Each run of a check starts from a fresh copy, so a module that remembers its previous call shows it
only when it is called again.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from jax_attn.parity.checking.reference_side import ReferenceSide
from jax_attn.parity.checking.weights import ToTorch
from jax_attn.parity.judge.compare import TensorReport, Verdict
from jax_attn.parity.judge.finding import Finding
from jax_attn.parity.judge.text import joined, quoted
from jax_attn.parity.run.asked_port import AskedPort
from jax_attn.parity.run.inputs_and_runs import SECOND, STATE, Arrays, Run, changed, wide

# The number of calls of a torch BatchNorm, which it counts for an option that is rarely used.
UNCOUNTED = "num_batches_tracked"


@dataclass
class StateFindings:
    """Reports and findings that the comparison of states adds to a result, over all transforms.

    draws: a sentence that says that the port draws random numbers; empty if it does not.
    """

    reports: list[TensorReport]
    failures: dict[Finding, None] = field(default_factory=dict)
    doubts: dict[Finding, None] = field(default_factory=dict)
    notes: dict[Finding, None] = field(default_factory=dict)
    draws: str = ""


@dataclass(frozen=True)
class States:
    """The state of both sides, for every run of a port.

    to_torch: the table as a function. paired: dotted paths of the port's
    Variables, other than its parameters, that the table pairs with buffers of the reference.
    """

    prepared: ReferenceSide
    port: AskedPort
    to_torch: ToTorch | None
    paired: frozenset[str]

    def compare(
        self, run: Run, transform: str, findings: StateFindings, *, outputs_fail: bool
    ) -> None:
        """Add the findings of one run of the port; none if no call changes any state.

        outputs_fail: whether outputs of the first call fail, so that a second call adds nothing.
        """
        if not (run.left or run.second or self.prepared.exact.left):
            return
        moved = changed(self.prepared.buffers, wide(self.prepared.exact.left))
        compared = self._compare_buffers(run, transform, findings)
        self._name_the_rest(run, {*moved} - compared, findings)
        if not outputs_fail:
            self._compare_second_calls(run, transform, findings)

    def _compare_buffers(self, run: Run, transform: str, findings: StateFindings) -> set[str]:
        """Compare the buffers that the table pairs, as the call leaves them; return their names."""
        if self.to_torch is None or not self.paired:
            return set()
        before = self.port.held(self.paired)
        after = {path: run.left.get(path, before[path]) for path in self.paired}
        got = wide(self.to_torch(after))
        if self.prepared.exact.left:
            findings.reports += [self.prepared.judge_one(STATE, k, transform, got[k]) for k in got]
        elif only_here := sorted(self.paired & run.left.keys()):
            line = f"the call changes {quoted(only_here)} of the port, but no buffer of the"
            line += " reference: check that both are in the same mode, training or evaluation"
            findings.failures[Finding("state-differs", line)] = None
        return {*got}

    def _name_the_rest(self, run: Run, buffers: set[str], findings: StateFindings) -> None:
        """Add a note on state that changes and is not compared, and on drawn random numbers."""
        drawn = run.left.keys() & self.port.facts.drawn
        if drawn:
            findings.draws = (
                "the port draws random numbers: a call changes its random state "
                f"{quoted(sorted(drawn))}; call its eval(), or give it deterministic=True (in "
                "Keras, training=False)"
            )
        names = sorted(name for name in buffers if name.split(".")[-1] != UNCOUNTED)
        paths = sorted(run.left.keys() - drawn - self.paired)
        sides = [f"buffers {quoted(names)} of the reference"] if names else []
        sides += [f"variables {quoted(paths)} of the port"] if paths else []
        if sides:
            why = "no row of the table pairs them" if self.to_torch else "no layout pairs them"
            line = f"the call changes {joined(sides)}: not compared, because {why}"
            line += "" if run.left else "; the port changes nothing"
            findings.notes[Finding("state-not-compared", line)] = None

    def _compare_second_calls(self, run: Run, transform: str, findings: StateFindings) -> None:
        if run.left and not run.second:
            line = (
                f"the port cannot be called a second time from the state that a call leaves in "
                f"{quoted(sorted(run.left))}, so a second call was not compared"
            )
            findings.notes[Finding("second-call-not-compared", line)] = None
            return
        if not (run.second or self.prepared.exact.second):
            return
        # A side without changed state gives the same outputs again.
        got = wide(run.second or run.outputs)
        reports = list(self._second_reports(got, transform))
        if any(report.verdict is Verdict.FAIL for report in reports):
            changes = bool(self.prepared.exact.left)
            kept = "no state" if changes else "state in attributes that are not Variables"
            kept = quoted(sorted(run.left)) if run.left else kept
            line = "a second call gives other outputs than the reference's second call"
            if excuse := self._excuse(run):
                findings.doubts[Finding("second-call-differs", f"{line}: {excuse}")] = None
                return
            line = f"{transform}: {line}; between calls the port keeps {kept}"
            findings.failures[Finding("second-call-differs", line)] = None
        findings.reports += reports

    def _second_reports(self, got: Arrays, transform: str) -> Iterator[TensorReport]:
        for name in self.prepared.exact.outputs:
            if name in got:
                yield self.prepared.judge_one(SECOND, name, transform, got[name])

    def _excuse(self, run: Run) -> str:
        """Return why a different second call may be correct, or "" if it is a fault."""
        if run.left and run.left.keys() <= self.port.facts.caches:
            return (
                f"the port's nnx.Cache {quoted(sorted(run.left))} continues where the first call "
                "ended; if each call should start afresh, reset it in port_call"
            )
        if not self.prepared.exact.left and self.prepared.remembers:
            return (
                "the reference remembers its first call outside of its buffers, which the check "
                "does not see; make it a buffer with register_buffer"
            )
        return ""
