"""Canaries: find the bugs of attention ports that the inputs of a check could not reveal.

The reference itself, in float64 and with one bug planted, takes the port's place in the
comparison: forward and, for the gradient's canary, backward. If it stays within the budget, a
port with that bug would pass on these inputs, and the check is INCONCLUSIVE. A canary costs one
run, in addition to the perturbed runs of the budget.
"""

import math
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from jax_attn.parity.bugs.planting import Watched, run_planted
from jax_attn.parity.checking.canaries.attention_facts import AttentionFacts
from jax_attn.parity.checking.canaries.branches import OF_MASKS, Branches
from jax_attn.parity.checking.canaries.epsilons import try_epsilons
from jax_attn.parity.checking.canaries.inputs import try_batches, try_equal_inputs, try_positions
from jax_attn.parity.checking.canaries.mask_patterns import try_mask_patterns
from jax_attn.parity.checking.canaries.masks import try_masks
from jax_attn.parity.checking.canaries.small_branches import try_small_branches
from jax_attn.parity.checking.canaries.softcaps import Tanhs, try_softcaps
from jax_attn.parity.checking.canaries.softmaxes import try_softmaxes
from jax_attn.parity.checking.canaries.weights import (
    try_neutral_weights,
    try_padding_ids,
    try_unread,
)
from jax_attn.parity.checking.canaries.windows import try_windows
from jax_attn.parity.checking.prepared import Prepared
from jax_attn.parity.judge.finding import Finding, Findings
from jax_attn.parity.run.at_once import together
from jax_attn.parity.run.reference import LONG
from jax_attn.parity.run.torch_settings import set_for_all_threads

Part = Callable[[], Findings]
_AT_ONCE = 2
"""Threads, each of which holds a run."""

_DROWNED = Finding(
    "drowned",
    "rounding alone may change each output by more than a tenth of its size, so which bugs these "
    "inputs would reveal was not checked; to show it, use smaller inputs, or a finer dtype",
)


def try_canaries(prepared: Prepared) -> Findings:
    """Plant canaries in the reference, and doubt the inputs that do not reveal them.

    Adds to `prepared.hidden` the names of those that the inputs hide or that left a note.
    """
    names = prepared.canaries
    if names is not None and not names:
        return Findings()
    facts, tanhs = AttentionFacts(prepared.dtype), Tanhs()
    branches, by_masks, elsewhere = Branches(), Branches(OF_MASKS), Branches()
    begun = time.perf_counter()
    run_planted(prepared.reference, Watched(facts, tanhs, branches))
    is_long = time.perf_counter() - begun >= LONG
    for inputs in prepared.reference.others:
        run_planted(prepared.reference.deciding_anew(inputs), Watched(elsewhere))
    of_masks = try_masks(prepared, facts, by_masks)  # fills by_masks, which others read
    every: dict[str, Part] = {
        "masks": lambda: of_masks,
        "mask patterns": lambda: try_mask_patterns(prepared),
        "positions": lambda: try_positions(prepared),
        "softmaxes": lambda: try_softmaxes(prepared, facts),
        "windows": lambda: try_windows(prepared, facts),
        "softcaps": lambda: try_softcaps(prepared, tanhs),
        "equal inputs": lambda: try_equal_inputs(prepared),
        "batches": lambda: try_batches(prepared),
        "epsilons": lambda: try_epsilons(prepared),
        "branches": lambda: branches.notes(by_masks, elsewhere),
        "unread": lambda: try_unread(prepared),
        "neutral weights": lambda: try_neutral_weights(prepared),
        "small branches": lambda: try_small_branches(prepared),
        "padding ids": lambda: try_padding_ids(prepared),
    }
    chosen = {name: part for name, part in every.items() if names is None or name in names}
    parts = [*chosen.values()]
    found = _at_once(prepared, parts) if is_long else [part() for part in parts]
    prepared.first.hidden.update(n for n, each in zip(chosen, found, strict=True) if any(each))
    _, doubts, notes = Findings.merged(found)
    if doubts and not _has_budget(prepared):
        doubts = ()  # no run could fail; the comparison reports why
    elif doubts and not prepared.has_power:
        doubts, notes = (), (*notes, _DROWNED)
    return Findings(doubts=doubts, notes=notes)


def _at_once(prepared: Prepared, parts: Sequence[Part]) -> list[Findings]:
    """Run the parts in up to two threads, each making one run after another."""
    for side in (prepared.first, prepared):  # computed once, before threads read them
        _ = side.exact, side.own, side.budgets
    has_grad, threads = torch.is_grad_enabled(), min(_AT_ONCE, torch.get_num_threads())

    def alone(part: Part) -> Findings:
        with torch.set_grad_enabled(has_grad):  # another thread has its own
            return part()

    with set_for_all_threads():
        return together([partial(alone, part) for part in parts], threads)


def _has_budget(prepared: Prepared) -> bool:
    return any(math.isfinite(budget.rms) for budget in prepared.budgets["output"].values())
