"""Rows of one layer each, made into rows for every layer, where the numbers allow it."""

import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TypeVar

from jax_attn.transfer.proposal.matching import ModulePair, TensorModule
from jax_attn.transfer.proposal.naming import ModuleName, Number
from jax_attn.transfer.table.rows import Row, bindings

T = TypeVar("T")
_NUMBER = re.compile(r"(0|[1-9]\d*)$")
Marks = Mapping[int, str]
"""A dotted name's parts by their place, to the name in braces that their number becomes."""


@dataclass(frozen=True)
class PairedRow:
    """A row with its numbers written out, and the pair of modules that it belongs to."""

    row: Row
    edge: ModulePair


def inconsistent(
    edges: Sequence[ModulePair], torch: Iterable[TensorModule], flax: Iterable[TensorModule]
) -> list[ModulePair]:
    """Those whose modules are numbered otherwise on the other side: three layers against two."""
    groups: dict[Hashable, list[ModulePair]] = defaultdict(list)
    for edge in edges:
        ours, theirs = ([n.token for n in side] for side in _sides(edge))
        key = _masked(edge.torch.name, ours), _masked(edge.flax.name, theirs)
        groups[key, tuple(ours), tuple(theirs)].append(edge)
    # Names that are equal once masked, counted once for each way of masking them.
    everywhere = {
        side: {
            at: _numberings((part.name for part in parts), at)
            for at in {key[side] for key in groups}
        }
        for side, parts in ((1, list(torch)), (2, list(flax)))
    }
    wrong = []
    for ((ours, theirs), *at), members in groups.items():
        here = {tuple(n.value for n in _sides(edge)[0]) for edge in members}
        if not here == everywhere[1][at[0]][ours] == everywhere[2][at[1]][theirs]:
            wrong += members
    return wrong


def folded_rows(found: Sequence[PairedRow], keys: Iterable[str], paths: Iterable[str]) -> list[Row]:
    """One row for all layers where it says what theirs say, no more and no less."""
    keys, paths = list(keys), list(paths)
    groups: dict[Row, list[PairedRow]] = defaultdict(list)
    for one in found:
        groups[folded_row(one)].append(one)
    rows = []
    for pattern, members in groups.items():
        reach = [bindings([name], keys) for name in pattern.keys]
        reach += [bindings([name], paths) for name in pattern.paths]
        alike = all(len(some) == len(members) and some == reach[0] for some in reach)
        rows += [pattern] if alike else [one.row for one in members]
    return rows


def folded_row(one: PairedRow) -> Row:
    """The row for every layer: what is numbered on both sides, but not "norm1", in braces."""
    pairs = [
        (a, b)
        for a, b in one.edge.aligned
        if foldable(one.edge.torch.name, a) and foldable(one.edge.flax.name, b)
    ]
    ours, theirs = (marks(side) for side in (zip(*pairs, strict=True) if pairs else ((), ())))
    keys = tuple(marked(key, ours) for key in one.row.keys)
    return Row(keys, tuple(marked(path, theirs) for path in one.row.paths), one.row.steps)


def folded(
    items: Iterable[T], pattern: Callable[[T], tuple[Hashable, ...]], names: Iterable[str]
) -> list[tuple[bool, list[T]]]:
    """Items of one pattern together, where they are all that its first, a name, stands for."""
    names = list(names)
    groups: dict[tuple[Hashable, ...], list[T]] = defaultdict(list)
    for item in items:
        groups[pattern(item)].append(item)
    made: list[tuple[bool, list[T]]] = []
    for (name, *_), members in groups.items():
        complete = len(bindings([name], names)) == len(members)
        made += [(True, members)] if complete else [(False, [member]) for member in members]
    return made


def pattern_of(dotted: str, name: ModuleName) -> str:
    """A key or path of the module `name`, for every layer."""
    return marked(dotted, marks(number for number in name.numbers if foldable(name, number)))


def foldable(name: ModuleName, number: Number) -> bool:
    """A number of its own, or of a container; "norm1" and "norm2" are no layers."""
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


def _sides(edge: ModulePair) -> tuple[list[Number], list[Number]]:
    return [a for a, _ in edge.aligned], [b for _, b in edge.aligned]


def _masked(name: ModuleName, places: Iterable[int]) -> str:
    return marked(".".join(name.tokens), dict.fromkeys(places, ""))


def _numberings(
    names: Iterable[ModuleName], places: Sequence[int]
) -> dict[str, set[tuple[int, ...]]]:
    found: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    for name in names:
        values = {number.token: number.value for number in name.numbers}
        if values.keys() >= set(places):
            found[_masked(name, places)].add(tuple(values[place] for place in places))
    return found
