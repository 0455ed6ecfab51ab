"""Merge bodies that do nearly alike into one body, with branches where they differ.

What remains of the merged body when the conditions of one use are put in is that use's own body,
statement by statement: lines are shared only where their texts are equal but for constants.
"""

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

from jax_attn.translate.module.merging.constants import text_of
from jax_attn.translate.rules.expression import stored


@dataclass(frozen=True)
class Condition:
    """Hold what is true for some uses of a class and not for others.

    Attributes:
      holds: the uses for which it is true.
      text: the condition in Python, and its negation.
      rank: conditions of lower rank are preferred.
      reads: the argument of the method that it reads, which no statement before may assign.
    """

    holds: frozenset[int]
    text: str
    negation: str
    rank: tuple[int, ...]
    reads: str | None = None


@dataclass
class MergedLine:
    """Hold one statement as each of its uses has it; they differ in constants."""

    statements: dict[int, ast.stmt]


@dataclass
class Branch:
    """Hold what uses do for which a condition is true, and what the others do."""

    condition: Condition
    then: "list[Part]"
    other: "list[Part]"


Part = MergedLine | Branch
# The range of a body's statements, by the group of uses that have this body.
_Spans = dict[int, tuple[int, int]]


def size(parts: Sequence[Part]) -> int:
    """Count the statements of a merged body."""
    return sum(
        1 + size(part.then) + size(part.other) if isinstance(part, Branch) else 1 for part in parts
    )


def lines(parts: Sequence[Part]) -> list[MergedLine]:
    """Return the lines of a merged body, in order."""
    found: list[MergedLine] = []
    for part in parts:
        found += [part] if isinstance(part, MergedLine) else [*lines(part.then), *lines(part.other)]
    return found


def conditions(parts: Sequence[Part]) -> list[Condition]:
    """Return the conditions of a merged body, in order."""
    found: list[Condition] = []
    for part in parts:
        if isinstance(part, Branch):
            found += [part.condition, *conditions(part.then), *conditions(part.other)]
    return found


def _common(one: Sequence[str], other: Sequence[str]) -> tuple[str, ...]:
    """Return the longest common subsequence."""
    lengths = [[0] * (len(other) + 1) for _ in range(len(one) + 1)]
    for i in reversed(range(len(one))):
        for j in reversed(range(len(other))):
            lengths[i][j] = (
                lengths[i + 1][j + 1] + 1
                if one[i] == other[j]
                else max(lengths[i + 1][j], lengths[i][j + 1])
            )
    found: list[str] = []
    i = j = 0
    while i < len(one) and j < len(other):
        if one[i] == other[j]:
            found.append(one[i])
            i, j = i + 1, j + 1
        elif lengths[i + 1][j] >= lengths[i][j + 1]:
            i += 1
        else:
            j += 1
    return tuple(found)


class InseparableError(Exception):
    """Tell that no condition separates uses whose bodies differ."""


class Merger:
    """Merge the bodies of the uses of a class.

    Args:
      bodies: the statements of each use.
      conditions: what is known to hold for some uses only.
      made: makes a condition that holds for given uses and not for others, or returns None if none
        can be made; the statements are what the uses have to themselves.
    """

    def __init__(
        self,
        bodies: Mapping[int, Sequence[ast.stmt]],
        conditions: Sequence[Condition],
        made: Callable[[frozenset[int], frozenset[int], Sequence[ast.stmt]], Condition | None],
    ) -> None:
        self.bodies = bodies
        self.conditions = conditions
        self.made = made
        by_text: dict[tuple[str, ...], list[int]] = {}
        for use, body in bodies.items():
            by_text.setdefault(tuple(map(text_of, body)), []).append(use)
        self.texts = list(by_text)
        self.uses = [frozenset(uses) for uses in by_text.values()]
        self.known: dict[Any, list[Part]] = {}

    def merged(self) -> list[Part]:
        """Merge all bodies.

        Raises:
          InseparableError: no condition tells bodies apart that differ.
        """
        return self._merged(self._whole(), frozenset())

    def _whole(self) -> _Spans:
        return {group: (0, len(text)) for group, text in enumerate(self.texts)}

    def halves(self) -> tuple[frozenset[int], frozenset[int]]:
        """Divide the uses in two, so that the bodies of each half are merged with least."""
        branch = self._branch(self._whole(), frozenset())
        holds = branch.condition.holds
        every = frozenset(self.bodies)
        return every & holds, every - holds

    def _merged(self, spans: _Spans, assigned: frozenset[str]) -> list[Part]:
        key = (tuple(sorted(spans.items())), assigned)
        if key not in self.known:
            self.known[key] = self._parts(spans, assigned)
        return self.known[key]

    def _text(self, group: int, span: tuple[int, int]) -> tuple[str, ...]:
        return self.texts[group][slice(*span)]

    def _line(self, places: Mapping[int, int]) -> MergedLine:
        return MergedLine(
            {
                use: self.bodies[use][place]
                for group, place in places.items()
                for use in sorted(self.uses[group])
            }
        )

    def _parts(self, spans: _Spans, assigned: frozenset[str]) -> list[Part]:
        texts = [self._text(group, span) for group, span in spans.items()]
        shared = reduce(_common, texts)
        if not shared:
            return [self._branch(spans, assigned)] if any(texts) else []
        parts: list[Part] = []
        here = {group: start for group, (start, _) in spans.items()}
        for text in shared:
            places = {
                group: self.texts[group].index(text, here[group], end)
                for group, (_, end) in spans.items()
            }
            between = {group: (here[group], places[group]) for group in spans}
            parts += self._merged(between, assigned)
            parts.append(self._line(places))
            every = (s for line in lines(parts) for s in line.statements.values())
            assigned = assigned.union(*map(stored, every))
            here = {group: place + 1 for group, place in places.items()}
        rest = {group: (here[group], end) for group, (_, end) in spans.items()}
        return parts + self._merged(rest, assigned)

    def _branch(self, spans: _Spans, assigned: frozenset[str]) -> Branch:
        """Divide by the condition with which least is written."""
        found = self._divided(self.conditions, spans, assigned)
        if found is None:
            found = self._divided(self._new_conditions(spans), spans, assigned)
        if found is None:
            raise InseparableError
        return found

    def _divided(
        self, conditions: Sequence[Condition], spans: _Spans, assigned: frozenset[str]
    ) -> Branch | None:
        best: tuple[tuple[int, tuple[int, ...]], Branch] | None = None
        tried: set[frozenset[int]] = set()
        for condition in sorted(conditions, key=lambda each: each.rank):
            if condition.reads in assigned:
                continue
            inside = {g: span for g, span in spans.items() if self.uses[g] <= condition.holds}
            outside = {g: span for g, span in spans.items() if not self.uses[g] & condition.holds}
            if not inside or not outside or len(inside) + len(outside) < len(spans):
                continue
            if frozenset(inside) in tried or frozenset(outside) in tried:
                continue
            tried.add(frozenset(inside))
            then, other = self._merged(inside, assigned), self._merged(outside, assigned)
            cost = (size(then) + size(other), condition.rank)
            if best is None or cost < best[0]:
                best = cost, Branch(condition, then, other)
        return best[1] if best is not None else None

    def _new_conditions(self, spans: _Spans) -> list[Condition]:
        by_text: dict[tuple[str, ...], list[int]] = {}
        for group, span in spans.items():
            by_text.setdefault(self._text(group, span), []).append(group)
        found: list[Condition] = []
        every = frozenset(use for group in spans for use in self.uses[group])
        for text, groups in by_text.items():
            if not text:
                continue
            holds = frozenset(use for group in groups for use in self.uses[group])
            start, end = spans[groups[0]]
            body = self.bodies[min(self.uses[groups[0]])][start:end]
            condition = self.made(holds, every - holds, body)
            found += [condition] if condition is not None else []
        return found
