"""Canaries of attention: bugs planted in every softmax at once, and in one softmax at a time."""

from dataclasses import dataclass, replace

import numpy as np

from jax_attn.parity.checking.canaries import softmax_bugs
from jax_attn.parity.checking.canaries.attention_facts import (
    SATURATED,
    SINGLE,
    AttentionFacts,
    Cause,
)
from jax_attn.parity.checking.canaries.findings import (
    DRAWN,
    NO_KEY,
    SOME_HIDDEN,
    DoubtsAndNotes,
    doubt,
)
from jax_attn.parity.checking.canaries.planted import run_planted, same
from jax_attn.parity.checking.canaries.softmax_bugs import BACKWARD, BuggySoftmax, SoftmaxBug
from jax_attn.parity.checking.prepared import Prepared
from jax_attn.parity.judge.finding import Finding, StandingNote
from jax_attn.parity.run.inputs_and_runs import Run


@dataclass(frozen=True)
class Canary:
    """A bug of ports, with its kind and name. reason, remedy: what hides and what reveals it, if
    that differs from the cause that the softmaxes themselves show."""

    kind: str
    name: str
    bug: SoftmaxBug
    reason: str = ""
    remedy: str = "{}"

    def doubt(self, cause: Cause) -> Finding:
        own = self.reason and cause not in (SINGLE, SATURATED)
        reason, remedy = (self.reason, DRAWN) if own else cause
        return doubt(self.kind, self.name, reason, self.remedy.format(remedy))


# Planted in every softmax at once.
_EVERYWHERE = (
    Canary("other-keys", "weights that go to other keys", softmax_bugs.rolled),
    Canary(
        "softmax-over-queries",
        "a softmax over the queries",
        softmax_bugs.over_queries,
        "",
        "T other than S, or {}",
    ),
    Canary(
        "mixed-heads",
        "queries and heads mixed up",
        softmax_bugs.mixed_axes,
        "T is the number of heads, and the outputs are alike either way",
        "T other than N, or {}",
    ),
    Canary(
        "ignored-mask",
        "an ignored mask",
        softmax_bugs.unmasked,
        NO_KEY,
        f"{SOME_HIDDEN}, or {{}}",
    ),
)
_STOPPED = Canary("stopped-gradient", "a gradient stopped at the scores", softmax_bugs.stopped)
_FINE = Canary("scale", "a scale of the scores 1% too large", softmax_bugs.scaled(1.01))
_COARSE = Canary("scale", "a scale of the scores twice too large", softmax_bugs.scaled(2.0))
# The finest that each precision shows. Planted everywhere, and in one softmax at a time.
_SCALES = {"float64": _FINE, "float32": _FINE, "float16": _COARSE, "bfloat16": _COARSE}
NO_SOFTMAX = StandingNote(
    "no-softmax",
    "the reference calls no softmax of torch's, so whether these inputs would reveal bugs of "
    "attention was not checked",
)
# The number of softmaxes tried one at a time: half the budget's own runs, each only forward.
ALONE = 8


def try_softmaxes(prepared: Prepared, facts: AttentionFacts) -> DoubtsAndNotes:
    """Plant each canary in all softmaxes; and the scale in each one, which others may hide."""
    scale = _SCALES[prepared.dtype]
    unseen: list[Canary] = []
    moved: list[float] = []
    notes: list[Finding] = []
    for canary in (scale, *_EVERYWHERE):
        mode = BuggySoftmax(canary.bug)
        run = run_planted(prepared.reference, mode)
        if not mode.met:
            return DoubtsAndNotes((), (NO_SOFTMAX,))
        if run is None:
            refused = (
                f"whether these inputs would reveal {canary.name} was not checked: the reference "
                "raises an error if this bug is planted in it"
            )
            notes.append(StandingNote("softmax-not-tried", refused))
            continue
        moved = moved or mode.moved  # from the scale, which comes first and applies everywhere
        if mode.planted and not prepared.would_fail(run):
            unseen.append(canary)
    doubts = []
    if unseen and _reaches(prepared, None):
        doubts = [canary.doubt(facts.cause()) for canary in unseen]
    several = len(moved) > 1
    suspects = _unseen_alone(prepared, scale, moved) if several else [0] if unseen else []
    blind = [place for place in suspects if _reaches(prepared, place)]
    if several and blind and scale not in unseen:
        alone = replace(scale, name=f"{scale.name} in {_places(blind, moved)} alone")
        doubts.append(alone.doubt(facts.cause(blind)))
    if idle := [place for place in suspects if place not in blind]:
        unused = (
            f"the weights of {_places(idle, moved)} do not affect any output (unused, or only "
            f"selected from), so {'their' if idle[1:] else 'its'} scale was not checked"
        )
        notes.append(Finding("softmax-unused", unused))
    if len(moved) > ALONE:
        few = (
            f"a wrong scale of one softmax alone was tried in {ALONE} of {len(moved)}: those "
            "whose weights it changes least"
        )
        notes.append(StandingNote("few-tried", few))
    if prepared.gradients:
        mode = BuggySoftmax(_STOPPED.bug, BACKWARD)
        run = prepared.reference.under(mode, prepared.cotangents)
        if mode.planted and not prepared.would_fail(run):
            doubts.append(_STOPPED.doubt(facts.cause()))
    return DoubtsAndNotes(tuple(doubts), tuple(notes))


def _unseen_alone(prepared: Prepared, scale: Canary, moved: list[float]) -> list[int]:
    """Return the places, of those that it moves least, where the scale's bug alone is not seen."""
    # At low precision, one layer of many may add only a rounding, so any change of outputs counts.
    shows = Prepared.would_fail if scale is _FINE else _changes_outputs
    least_moved = sorted(range(len(moved)), key=moved.__getitem__)[:ALONE]
    return [
        place
        for place in sorted(least_moved)
        if (run := run_planted(prepared.reference, BuggySoftmax(scale.bug, place=place)))
        and not shows(prepared, run)
    ]


def _places(places: list[int], moved: list[float]) -> str:
    return f"softmax {', '.join(str(place + 1) for place in places)} of {len(moved)}"


def _changes_outputs(prepared: Prepared, run: Run) -> bool:
    want = prepared.exact.kinds["output"]
    return any(not same(got, want[name]) for name, got in run.kinds["output"].items())


def _reaches(prepared: Prepared, place: int | None) -> bool:
    """Return whether an output is computed, not only selected, from this softmax's weights.

    place: the index of the softmax; None means any."""
    run = run_planted(prepared.reference, BuggySoftmax(softmax_bugs.nowhere, place=place))
    want = prepared.exact.kinds["output"]
    return run is None or any(
        (np.isnan(got) & ~np.isnan(want[name])).any() for name, got in run.kinds["output"].items()
    )
