"""Folding of single layers' rows into rows for all layers, if the numbers allow it."""

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import count, product
from typing import Generic, NamedTuple, TypeVar

from jax_attn.transfer.proposal.matching import Fit, ModulePair, Steps, TensorModule
from jax_attn.transfer.proposal.naming import ModuleName, Number
from jax_attn.transfer.table.rows import Row, bindings

T = TypeVar("T")
_NUMBER = re.compile(r"(0|[1-9]\d*)$")
Marks = Mapping[int, str]
"""Positions in a dotted name -> the names in braces that replace the numbers there."""


class _Mask(NamedTuple):
    """A dotted name with its numbers at some positions removed."""

    masked: str
    places: tuple[int, ...]


class LayerItem(NamedTuple, Generic[T]):
    """An item of one layer, and the same with layer numbers replaced by names in braces."""

    own: T
    pattern: T


def misnumbered(
    pairs: Sequence[ModulePair], torch: Iterable[TensorModule], flax: Iterable[TensorModule]
) -> list[ModulePair]:
    """Return pairs of modules numbered differently on the two sides: three layers against two."""
    groups: dict[tuple[_Mask, _Mask], list[ModulePair]] = defaultdict(list)
    for pair in pairs:
        ours, theirs = (tuple(number.token for number in side) for side in _sides(pair))
        groups[_mask(pair.torch.name, ours), _mask(pair.flax.name, theirs)].append(pair)
    # Names that are equal once masked, collected once for each way of masking.
    of_torch = _numberings(torch, {ours.places for ours, _ in groups})
    of_flax = _numberings(flax, {theirs.places for _, theirs in groups})
    odd = []
    for (ours_mask, theirs_mask), members in groups.items():
        paired = {tuple(number.value for number in _sides(pair)[0]) for pair in members}
        if not paired == of_torch[ours_mask] == of_flax[theirs_mask]:
            odd += members
    return odd


def folded(items: Iterable[LayerItem[T]], complete: Callable[[T, int], bool]) -> list[T]:
    """Replace all layers' items by one pattern if it is complete; keep the others.

    complete: whether a pattern matches exactly this number of items.
    """
    groups: dict[T, list[T]] = defaultdict(list)
    for own, pattern in items:
        groups[pattern].append(own)
    kept = ([p] if complete(p, len(members)) else members for p, members in groups.items())
    return [item for items in kept for item in items]


def folded_rows(
    rows: Iterable[LayerItem[Row]], keys: Collection[str], paths: Collection[str]
) -> list[Row]:
    """Replace the layers' rows by one row if it matches exactly these rows."""

    def complete(pattern: Row, count: int) -> bool:
        reach = [bindings([name], keys) for name in pattern.keys]
        reach += [bindings([name], paths) for name in pattern.paths]
        return all(len(some) == count and some == reach[0] for some in reach)

    return folded(rows, complete)


def rows_of(pair: ModulePair, fit: Fit, steps: Steps) -> LayerItem[Row]:
    """Return one layer's row, and the row for all layers.

    The latter replaces numbers that both sides have, except numbers as in "norm1".
    """
    names = pair.torch.name, pair.flax.name
    shared = [way for way in pair.aligned if all(map(foldable, names, way))]
    ours, theirs = (marks(side) for side in (zip(*shared, strict=True) if shared else ((), ())))
    keys = tuple(marked(key, ours) for key in fit.source.names)
    paths = tuple(marked(path, theirs) for path in fit.target.names)
    return LayerItem(Row(fit.source.names, fit.target.names, steps), Row(keys, paths, steps))


def pattern_of(dotted: str, name: ModuleName) -> str:
    """Return the pattern, for every layer, of a key or path of the module `name`."""
    return marked(dotted, marks(number for number in name.numbers if foldable(name, number)))


def foldable(name: ModuleName, number: Number) -> bool:
    """Return whether a number counts layers; those of "norm1" and "norm2" do not."""
    last = number.token == len(name.tokens) - 1
    return not last or name.tokens[number.token].isdecimal()


def marks(numbers: Iterable[Number]) -> dict[int, str]:
    """Map positions to names in braces: layer, part2, part3, …"""
    names = (f"part{i}" if i > 1 else "layer" for i in count(1))
    return {number.token: name for number, name in zip(numbers, names, strict=False)}


def marked(dotted: str, places: Marks) -> str:
    """Return the dotted name with its numbers at these positions replaced by names in braces."""
    tokens = dotted.split(".")
    for place, name in places.items():
        tokens[place] = _NUMBER.sub(f"{{{name}}}", tokens[place])
    return ".".join(tokens)


def _sides(pair: ModulePair) -> tuple[list[Number], list[Number]]:
    return [a for a, _ in pair.aligned], [b for _, b in pair.aligned]


def _mask(name: ModuleName, places: tuple[int, ...]) -> _Mask:
    return _Mask(marked(".".join(name.tokens), dict.fromkeys(places, "")), places)


def _numberings(
    modules: Iterable[TensorModule], ways: Iterable[tuple[int, ...]]
) -> dict[_Mask, set[tuple[int, ...]]]:
    """Return the numbers at the masked positions, over all modules and ways of masking."""
    numberings: dict[_Mask, set[tuple[int, ...]]] = defaultdict(set)
    for name, places in product([module.name for module in modules], ways):
        values = {number.token: number.value for number in name.numbers}
        if values.keys() >= set(places):
            numberings[_mask(name, places)].add(tuple(values[place] for place in places))
    return numberings
