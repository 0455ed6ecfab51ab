"""What a call changes in the modules, and what a second call from there gives, on both sides.

Each run of a check starts from a fresh copy, so that a module that remembers its previous call
shows it only where it is called again.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from flax import nnx

from jax_attn.parity.checking.prepared import Prepared
from jax_attn.parity.checking.weights import ToTorch
from jax_attn.parity.judge.compare import TensorReport, Verdict
from jax_attn.parity.judge.finding import Finding
from jax_attn.parity.judge.text import joined, quoted
from jax_attn.parity.run.inputs_and_runs import SECOND, STATE, Arrays, Run, wide
from jax_attn.parity.run.port import Port, held, paths_of
from jax_attn.parity.run.reference import changed

# How many calls a BatchNorm of torch's has seen; it counts them for an option that is rarely on.
UNCOUNTED = "num_batches_tracked"


@dataclass
class StateFindings:
    """What the comparison of states adds to a result, over all transforms.

    draws: that the port draws random numbers; empty where it does not.
    """

    reports: list[TensorReport]
    failures: dict[Finding, None] = field(default_factory=dict)
    doubts: dict[Finding, None] = field(default_factory=dict)
    notes: dict[Finding, None] = field(default_factory=dict)
    draws: str = ""


@dataclass(frozen=True)
class States:
    """Both sides' state, for every run of a port.

    to_torch, paired: the table, and the dotted paths of the port's Variables, beside its
    parameters, that it pairs with buffers of the reference.
    """

    prepared: Prepared
    port: Port
    to_torch: ToTorch | None
    paired: frozenset[str]

    def compare(
        self, run: Run, transform: str, findings: StateFindings, *, outputs_fail: bool
    ) -> None:
        """Add what one run of the port shows; nothing where no call changes anything.

        outputs_fail: those of the first call, so that a second would say nothing new.
        """
        if not (run.left or run.second or self.prepared.exact.left):
            return
        moved = changed(self.prepared.buffers, wide(self.prepared.exact.left))
        compared = self._compare_buffers(run, transform, findings)
        self._name_the_rest(run, {*moved} - compared, findings)
        if not outputs_fail:
            self._compare_second_calls(run, transform, findings)

    def _compare_buffers(self, run: Run, transform: str, findings: StateFindings) -> set[str]:
        """Each buffer that the table pairs, after the call; their names."""
        if self.to_torch is None or not self.paired:
            return set()
        before = held(self.port.module)
        after = {path: run.left.get(path, np.asarray(before[path])) for path in self.paired}
        got = wide(self.to_torch(after))
        if self.prepared.exact.left:
            findings.reports += [self.prepared.judge_one(STATE, k, transform, got[k]) for k in got]
        elif only_here := sorted(self.paired & run.left.keys()):
            line = f"the call changes {quoted(only_here)} of the port, and no buffer of the"
            line += " reference: is one in training mode, and one not?"
            findings.failures[Finding("state-differs", line)] = None
        return {*got}

    def _name_the_rest(self, run: Run, buffers: set[str], findings: StateFindings) -> None:
        """A note on what changes and was not compared, and on random numbers that are drawn."""
        drawn = run.left.keys() & paths_of(self.port.module, nnx.RngState)
        if drawn:
            findings.draws = (
                f"the port draws random numbers, since its RngState {quoted(sorted(drawn))} "
                "moves: call its eval(), or give it deterministic=True"
            )
        names = sorted(name for name in buffers if name.split(".")[-1] != UNCOUNTED)
        paths = sorted(run.left.keys() - drawn - self.paired)
        sides = [f"buffers {quoted(names)} of the reference"] if names else []
        sides += [f"Variables {quoted(paths)} of the port"] if paths else []
        if sides:
            why = "no row of the table pairs them" if self.to_torch else "no layout pairs them"
            line = f"the call changes {joined(sides)}: not compared, as {why}"
            line += "" if run.left else "; the port changes nothing"
            findings.notes[Finding("state-not-compared", line)] = None

    def _compare_second_calls(self, run: Run, transform: str, findings: StateFindings) -> None:
        if run.left and not run.second:
            line = (
                f"the port cannot be called a second time from what a call leaves in "
                f"{quoted(sorted(run.left))}: a second call was not compared"
            )
            findings.notes[Finding("second-call-not-compared", line)] = None
            return
        if not (run.second or self.prepared.exact.second):
            return
        # A side that nothing is changed in gives the same again.
        got = wide(run.second or run.outputs)
        reports = list(self._second_reports(got, transform))
        if any(report.verdict is Verdict.FAIL for report in reports):
            kept = (
                "nothing"
                if self.prepared.exact.left
                else "something in attributes that are no Variables"
            )
            kept = quoted(sorted(run.left)) if run.left else kept
            line = "a second call gives other outputs than the reference's does"
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
        """Why a second call that differs shows no fault; empty where it does."""
        if run.left and run.left.keys() <= paths_of(self.port.module, nnx.Cache):
            return (
                f"the port's nnx.Cache {quoted(sorted(run.left))} goes on where the first call "
                "ended; where each call is to begin anew, reset it in port_call"
            )
        if not self.prepared.exact.left and self.prepared.remembers:
            return (
                "the reference remembers its first call outside of its buffers, where it is not "
                "looked for; register_buffer would show it"
            )
        return ""
