"""Rows that shapes force: parameters that only each other fit, where all that is open can pair."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import product

from jax_attn.transfer.proposal.matching import Fit, Leaf, ModulePair, TensorModule, fit_of
from jax_attn.transfer.proposal.naming import Bond, contradict


def forced(
    torch: Iterable[TensorModule],
    flax: Iterable[TensorModule],
    done: Collection[str],
    written: Collection[str],
    is_certain: Callable[[TensorModule, TensorModule, Fit], bool],
) -> list[ModulePair]:
    """Return pairs, each with the one fit of two open parameters that a complete table must have.

    done, written: torch keys and Flax paths that are decided. A fit is forced if each of its two
    parameters fits no other open one, and if as many are open on both sides in every group of
    parameters that fit one another. Otherwise no table is complete, and shapes tell nothing.
    """
    ours = _open(torch, done)
    theirs = _open((module for module in flax if not module.packs), written)
    options: dict[Leaf, list[tuple[TensorModule, TensorModule, Fit]]] = defaultdict(list)
    for (t, source), (f, target) in product(ours, theirs):
        fit = None if contradict(t.name, f.name) else fit_of(t, source, f, target)
        if fit is not None:
            options[source].append((t, f, fit))
            options[target].append((t, f, fit))
    if not _all_can_pair([leaf for _, leaf in ours], [leaf for _, leaf in theirs], options):
        return []
    return [
        ModulePair(t, f, Bond.NONE, (fit,))
        for _, source in ours
        for t, f, fit in options[source][:1]
        if len(options[source]) == len(options[fit.target]) == 1 and is_certain(t, f, fit)
    ]


def _open(
    modules: Iterable[TensorModule], names: Collection[str]
) -> list[tuple[TensorModule, Leaf]]:
    return [
        (module, leaf)
        for module in modules
        for leaf in module.leaves.values()
        if not set(names) & set(leaf.names)
    ]


def _all_can_pair(
    ours: Sequence[Leaf],
    theirs: Sequence[Leaf],
    options: dict[Leaf, list[tuple[TensorModule, TensorModule, Fit]]],
) -> bool:
    """Return whether each group of parameters that fit one another has as many on both sides."""
    group = {leaf: {leaf} for leaf in (*ours, *theirs)}
    for fit in (fit for found in options.values() for _, _, fit in found):
        whole = group[fit.source] | group[fit.target]
        group.update(dict.fromkeys(whole, whole))
    of_ours = set(ours)
    return all(2 * len(of_ours & whole) == len(whole) for whole in group.values())
