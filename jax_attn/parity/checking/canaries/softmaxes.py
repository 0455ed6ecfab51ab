"""Canaries of attention: bugs planted in every softmax at once, and in one softmax at a time."""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from jax_attn.parity.bugs import softmax
from jax_attn.parity.bugs.bug import Site
from jax_attn.parity.bugs.planting import run_planted
from jax_attn.parity.bugs.softmax import SoftmaxBug
from jax_attn.parity.bugs.tensors import with_inputs
from jax_attn.parity.checking.canaries.attention_facts import (
    FAINT,
    SATURATED,
    SINGLE,
    AttentionFacts,
    Hiding,
)
from jax_attn.parity.checking.canaries.findings import doubt, not_tried
from jax_attn.parity.checking.canaries.masks import is_mask
from jax_attn.parity.checking.canaries.seen import same
from jax_attn.parity.checking.prepared import Prepared
from jax_attn.parity.judge.finding import Finding, Findings, StandingNote
from jax_attn.parity.run.inputs_and_runs import Run, is_float

# Planted in every softmax at once.
_EVERYWHERE = (
    softmax.OTHER_KEYS,
    softmax.OVER_QUERIES,
    softmax.MIXED_HEADS,
    softmax.UNMASKED,
)
# The finest scale that each precision shows. Planted everywhere, and in one softmax at a time.
_SCALES = {
    "float64": softmax.SCALE,
    "float32": softmax.SCALE,
    "float16": softmax.COARSE_SCALE,
    "bfloat16": softmax.COARSE_SCALE,
}
NO_SOFTMAX = StandingNote(
    "no-softmax",
    "the reference calls no softmax of torch's, so whether these inputs would reveal bugs of "
    "attention was not checked",
)
# The number of softmaxes tried one at a time: half the budget's own runs, each only forward.
ALONE = 8


def try_softmaxes(prepared: Prepared, facts: AttentionFacts) -> Findings:
    """Plant each bug in all softmaxes; and the scale in each one, which others may hide."""
    scale = _SCALES[prepared.dtype]
    unseen: list[SoftmaxBug] = []
    sites: dict[Site, float] = {}
    notes: list[Finding] = []
    for bug in (scale, *_EVERYWHERE):
        mode = bug.planted()
        run = run_planted(prepared.reference, mode)
        if not mode.count:
            return Findings(notes=(NO_SOFTMAX,))
        if run is None:
            notes.append(not_tried(bug.says))
            continue
        # Those of the scale, which comes first and applies everywhere.
        sites = sites or {site: effect.moved for site, effect in mode.effects.items()}
        if mode.planted and not prepared.would_fail(run):
            unseen.append(bug)
    for bug, note in _SHOWN_BY_NONE.items() if facts.hiding() is FAINT else ():
        if bug in unseen and _no_input_shows(prepared, bug):
            unseen.remove(bug)
            notes.append(note)
    doubts = []
    if unseen and _reaches(prepared, None):
        doubts = [_doubt(bug, facts.hiding()) for bug in unseen]
    several = len(sites) > 1
    suspects = _unseen_alone(prepared, scale, sites) if several else [*sites] if unseen else []
    blind = [site for site in suspects if _reaches(prepared, site)]
    if several and blind and scale not in unseen:
        alone = replace(scale, says=f"{scale.says} in {_named(blind, sites)} alone")
        doubts.append(_doubt(alone, facts.hiding(blind)))
    if idle := [site for site in suspects if site not in blind]:
        unused = (
            f"the weights of {_named(idle, sites)} do not affect any output (unused, or only "
            f"selected from), so {'their' if idle[1:] else 'its'} scale was not checked"
        )
        notes.append(Finding("softmax-unused", unused))
    if len(sites) > ALONE:
        few = (
            f"a wrong scale of one softmax alone was tried in {ALONE} of {len(sites)}: those "
            "whose weights it changes least; to try the others, check parts of the model that have "
            f"at most {ALONE} softmaxes each"
        )
        notes.append(StandingNote("few-tried", few))
    if prepared.gradients:
        mode = softmax.STOPPED.planted()
        run = run_planted(prepared.reference, mode, prepared.cotangents)
        if run is None:
            notes.append(not_tried(softmax.STOPPED.says))
        elif mode.planted and not prepared.would_fail(run):
            doubts.append(_doubt(softmax.STOPPED, facts.hiding()))
    return Findings(doubts=tuple(doubts), notes=tuple(notes))


def _no_input_shows(prepared: Prepared, bug: SoftmaxBug) -> bool:
    """Return whether a bug changes no output on drawn inputs, either.

    The sum of an entropy is the same in whatever order its terms are, and a contrastive loss in
    both directions is the same if the directions are exchanged.
    """
    rng, reference = np.random.default_rng(prepared.seed), prepared.reference
    drawn = {
        name: rng.standard_normal(a.shape)
        for name, a in reference.inputs.by_name.items()
        if is_float(a.dtype) and not is_mask(reference, name, a)
    }
    others = with_inputs(reference, drawn)
    right = run_planted(others)
    wrong = run_planted(others, bug.planted())
    if not drawn or right is None or wrong is None:
        return False
    want = right.kinds["output"]
    return all(
        np.isfinite(want[name]).all() and same(got, want[name])
        for name, got in wrong.kinds["output"].items()
    )


_SHOWN_BY_NONE = {
    softmax.OTHER_KEYS: StandingNote(
        "other-keys",
        "the outputs do not depend on the order of a softmax's keys, so no inputs would reveal "
        "weights that go to other keys",
    ),
    softmax.OVER_QUERIES: StandingNote(
        "softmax-over-queries",
        "the outputs stay the same if every softmax is taken over the queries, as for a loss that "
        "adds up both directions, so no inputs would reveal that",
    ),
}
"""Bug -> the note, if it changes no output on any inputs."""


def _doubt(bug: SoftmaxBug, hiding: Hiding) -> Finding:
    own = bug.hidden_by and hiding not in (SINGLE, SATURATED)
    reason, remedy = (bug.hidden_by, softmax.DRAWN) if own else hiding
    return doubt(bug.kind, bug.says, reason, bug.revealed_by.format(remedy))


def _unseen_alone(prepared: Prepared, scale: SoftmaxBug, sites: dict[Site, float]) -> list[Site]:
    """Return the sites, of those that it moves least, where the scale's bug alone is not seen."""
    # At low precision, one layer of many may add only a rounding, so any change of outputs counts.
    shows = Prepared.would_fail if scale is softmax.SCALE else _changes_outputs
    least_moved = sorted(sites, key=sites.__getitem__)[:ALONE]
    return [
        site
        for site in sites
        if site in least_moved
        and (run := run_planted(prepared.reference, scale.planted(site)))
        and not shows(prepared, run)
    ]


def _named(some: Iterable[Site], sites: dict[Site, float]) -> str:
    order = [*sites]
    numbers = ", ".join(str(order.index(site) + 1) for site in some)
    return f"softmax {numbers} of {len(sites)}"


def _changes_outputs(prepared: Prepared, run: Run) -> bool:
    want = prepared.exact.kinds["output"]
    return any(not same(got, want[name]) for name, got in run.kinds["output"].items())


def _reaches(prepared: Prepared, site: Site | None) -> bool:
    """Return whether an output is computed, not only selected, from this softmax's weights.

    site: that of the softmax; None means any."""
    run = run_planted(prepared.reference, softmax.NOWHERE.planted(site))
    want = prepared.exact.kinds["output"]
    return run is None or any(
        (np.isnan(got) & ~np.isnan(want[name])).any() for name, got in run.kinds["output"].items()
    )
