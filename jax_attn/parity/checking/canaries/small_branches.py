"""Canaries of branches that are added and too small to show, such as LayerScale's of 1e-6.

Gradients show them. Without gradients, a port that leaves one out passes.
"""

from functools import partial

import torch

from jax_attn.parity.bugs.bug import HIDES, Bug, OperatorCall, Site
from jax_attn.parity.bugs.planting import Planted, run_planted
from jax_attn.parity.checking.canaries.findings import inside, not_tried
from jax_attn.parity.checking.prepared import Prepared
from jax_attn.parity.judge.finding import Finding, Findings, StandingNote

_SMALL = 1e-3
"""A term of a sum of at most this share of it may be lost in the rounding of what follows."""
_SUMS = ("add", "addcmul", "addmm", "sub")
ALONE = 8
"""The number of branches that are left out one at a time: the smallest."""


class _WithoutBranches(Planted):
    """Float64 in which sums lose a small term, also those that are made in place."""

    in_place = (*Planted.in_place, "add_", "addcmul_", "sub_")


def _without_branch(call: OperatorCall) -> Bug | None:
    """Return the bug of a sum of two tensors without its smaller term, if that is small."""
    first = call.args[0]
    if not isinstance(first, torch.Tensor) or not isinstance(call.args[1], torch.Tensor):
        return None
    total = call.result()
    if not total.is_floating_point() or total.numel() < 2 or bool((total <= HIDES).any()):
        return None  # beside a mask's fill, every score is small
    terms = sorted((first.expand_as(total), total - first), key=torch.linalg.vector_norm)
    small, large = (float(torch.linalg.vector_norm(x)) for x in terms)
    if not 0 < small <= _SMALL * large < float("inf"):
        return None
    return Bug("residual", "without a small branch", lambda call: terms[1].clone())


_branches_left_out = partial(_WithoutBranches, _SUMS, _without_branch)


def try_small_branches(prepared: Prepared) -> Findings:
    """Note the terms of sums that would not be missed, if gradients are not compared."""
    if prepared.gradients:
        return Findings()
    mode = _branches_left_out()
    run = run_planted(prepared.reference, mode)
    if not mode.effects:
        return Findings()
    if run is None:
        return Findings(notes=(not_tried("a missing branch"),))
    smallest = sorted(mode.effects, key=lambda site: mode.effects[site].moved)
    unseen = [site for site in smallest[:ALONE] if not _is_missed(prepared, site)]
    notes: list[Finding] = []
    if unseen:
        sentence = (
            f"what is added{inside([site.path for site in unseen])} is so small that a port "
            "without it would pass; to show it, use gradients=True, or larger numbers there on "
            "both sides, such as those of a trained model"
        )
        notes.append(Finding("small-branch", sentence))
    if len(smallest) > ALONE:
        few = (
            f"a missing branch was tried in {ALONE} of {len(smallest)} small ones, the smallest; "
            "to show any of them, use gradients=True: a port without it lacks its gradients"
        )
        notes.append(StandingNote("few-tried", few))
    return Findings(notes=tuple(notes))


def _is_missed(prepared: Prepared, site: Site) -> bool:
    run = run_planted(prepared.reference, _branches_left_out(at=site))
    return run is None or prepared.would_fail(run)
