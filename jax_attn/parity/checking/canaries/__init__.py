"""Canaries: what the inputs of a check could not reveal, of the bugs that ports of attention have.

The reference itself, in float64 and with one bug planted, goes through the comparison in the
port's place: forward and, for the gradient's canary, backward. If it stays within the budget, a
port with that bug would pass on these inputs, and the check is INCONCLUSIVE. A canary costs one
run, beside the perturbed runs of the budget.
"""

import math
from itertools import chain

from jax_attn.parity.checking.canaries.attention_facts import AttentionFacts
from jax_attn.parity.checking.canaries.branches import OF_MASKS, Branches
from jax_attn.parity.checking.canaries.data.batches import try_batches
from jax_attn.parity.checking.canaries.data.equal_inputs import try_equal_inputs
from jax_attn.parity.checking.canaries.data.mask_patterns import try_mask_patterns
from jax_attn.parity.checking.canaries.data.neutral_weights import try_neutral_weights
from jax_attn.parity.checking.canaries.data.padding_ids import try_padding_ids
from jax_attn.parity.checking.canaries.data.positions import try_positions
from jax_attn.parity.checking.canaries.data.unread import try_unread
from jax_attn.parity.checking.canaries.epsilons import try_epsilons
from jax_attn.parity.checking.canaries.findings import DoubtsAndNotes
from jax_attn.parity.checking.canaries.masks import try_masks
from jax_attn.parity.checking.canaries.softcaps import Tanhs, try_softcaps
from jax_attn.parity.checking.canaries.softmaxes import try_softmaxes
from jax_attn.parity.checking.canaries.watched import Watched, run_placed
from jax_attn.parity.checking.canaries.windows import try_windows
from jax_attn.parity.checking.prepared import Prepared
from jax_attn.parity.judge.finding import Finding

__all__ = ["DoubtsAndNotes", "try_canaries"]

_DROWNED = Finding(
    "drowned",
    "rounding alone may change each output by more than a tenth of its size, so which bugs these "
    "inputs would reveal was not checked; to show it, use smaller inputs, or a finer dtype",
)


def try_canaries(prepared: Prepared) -> DoubtsAndNotes:
    """Plant each canary in the reference, and doubt the inputs that do not reveal it."""
    facts, tanhs = AttentionFacts(prepared.dtype), Tanhs()
    branches, by_masks = Branches(), Branches(OF_MASKS)
    run_placed(prepared.reference, Watched([facts, tanhs, branches]))
    parts = (
        try_masks(prepared, facts, by_masks),
        try_mask_patterns(prepared),
        try_positions(prepared),
        try_softmaxes(prepared, facts),
        try_windows(prepared, facts),
        try_softcaps(prepared, tanhs),
        try_equal_inputs(prepared),
        try_batches(prepared),
        try_epsilons(prepared),
        branches.notes(by_masks),
        try_unread(prepared),
        try_neutral_weights(prepared),
        try_padding_ids(prepared),
    )
    doubts, notes = (tuple(chain.from_iterable(lines)) for lines in zip(*parts, strict=True))
    if doubts and not _has_budget(prepared):
        doubts = ()  # no run could fail, for a reason that the comparison names
    elif doubts and not prepared.has_power:
        doubts, notes = (), (*notes, _DROWNED)
    return DoubtsAndNotes(doubts, notes)


def _has_budget(prepared: Prepared) -> bool:
    return any(math.isfinite(budget.rms) for budget in prepared.budgets["output"].values())
