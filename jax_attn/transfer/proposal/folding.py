"""Rows of single layers folded into rows for all layers, where the numbers allow it."""

import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, product
from typing import NamedTuple, TypeVar

from jax_attn.transfer.proposal.matching import ModulePair, TensorModule
from jax_attn.transfer.proposal.naming import ModuleName, Number
from jax_attn.transfer.table.rows import Row, bindings

T = TypeVar("T")
_NUMBER = re.compile(r"(0|[1-9]\d*)$")
Marks = Mapping[int, str]
"""Places in a dotted name, to the names in braces that the numbers there become."""


class _Mask(NamedTuple):
    """A dotted name without its numbers at some places."""

    masked: str
    places: tuple[int, ...]


@dataclass(frozen=True)
class PairedRow:
    """A row with its numbers written out, and the pair of modules that it belongs to."""

    row: Row
    pair: ModulePair


def misnumbered(
    pairs: Sequence[ModulePair], torch: Iterable[TensorModule], flax: Iterable[TensorModule]
) -> list[ModulePair]:
    """Pairs of modules that are numbered differently on the two sides: three layers against two."""
    groups: dict[tuple[_Mask, _Mask], list[ModulePair]] = defaultdict(list)
    for pair in pairs:
        ours, theirs = (tuple(number.token for number in side) for side in _sides(pair))
        groups[_mask(pair.torch.name, ours), _mask(pair.flax.name, theirs)].append(pair)
    # Names that are equal once masked, counted once for each way of masking them.
    of_torch = _numberings(torch, {ours.places for ours, _ in groups})
    of_flax = _numberings(flax, {theirs.places for _, theirs in groups})
    odd = []
    for (ours_mask, theirs_mask), members in groups.items():
        paired = {tuple(number.value for number in _sides(pair)[0]) for pair in members}
        if not paired == of_torch[ours_mask] == of_flax[theirs_mask]:
            odd += members
    return odd


def folded_rows(
    decided: Iterable[PairedRow], keys: Iterable[str], paths: Iterable[str]
) -> list[Row]:
    """One row for all layers where it stands for exactly the layers' own rows."""
    keys, paths = list(keys), list(paths)
    groups: dict[Row, list[PairedRow]] = defaultdict(list)
    for one in decided:
        groups[folded_row(one)].append(one)
    rows = []
    for pattern, members in groups.items():
        reach = [bindings([name], keys) for name in pattern.keys]
        reach += [bindings([name], paths) for name in pattern.paths]
        alike = all(len(some) == len(members) and some == reach[0] for some in reach)
        rows += [pattern] if alike else [one.row for one in members]
    return rows


def folded_row(one: PairedRow) -> Row:
    """The row for every layer: numbers that both sides have, but not that of "norm1", in braces."""
    shared = [
        (a, b)
        for a, b in one.pair.aligned
        if foldable(one.pair.torch.name, a) and foldable(one.pair.flax.name, b)
    ]
    ours, theirs = (marks(side) for side in (zip(*shared, strict=True) if shared else ((), ())))
    keys = tuple(marked(key, ours) for key in one.row.keys)
    return Row(keys, tuple(marked(path, theirs) for path in one.row.paths), one.row.steps)


def folded(
    items: Iterable[T], pattern: Callable[[T], tuple[str, Hashable]], names: Iterable[str]
) -> list[tuple[bool, list[T]]]:
    """Items of one pattern together, where they are all that the pattern's name stands for."""
    names = list(names)
    groups: dict[tuple[str, Hashable], list[T]] = defaultdict(list)
    for item in items:
        groups[pattern(item)].append(item)
    together: list[tuple[bool, list[T]]] = []
    for (name, _), members in groups.items():
        complete = len(bindings([name], names)) == len(members)
        together += [(True, members)] if complete else [(False, [member]) for member in members]
    return together


def pattern_of(dotted: str, name: ModuleName) -> str:
    """A key or path of the module `name`, for every layer."""
    return marked(dotted, marks(number for number in name.numbers if foldable(name, number)))


def foldable(name: ModuleName, number: Number) -> bool:
    """Whether a number counts layers; those of "norm1" and "norm2" do not."""
    last = number.token == len(name.tokens) - 1
    return not last or name.tokens[number.token].isdecimal()


def marks(numbers: Iterable[Number]) -> dict[int, str]:
    """The names in braces: layer, part2, part3, …"""
    names = (f"part{i}" if i > 1 else "layer" for i in count(1))
    return {number.token: name for number, name in zip(numbers, names, strict=False)}


def marked(dotted: str, places: Marks) -> str:
    """The dotted name with its numbers at these places replaced by names in braces."""
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
    """The numbers at the masked places, over all modules and ways of masking."""
    numberings: dict[_Mask, set[tuple[int, ...]]] = defaultdict(set)
    for name, places in product([module.name for module in modules], ways):
        values = {number.token: number.value for number in name.numbers}
        if values.keys() >= set(places):
            numberings[_mask(name, places)].add(tuple(values[place] for place in places))
    return numberings
