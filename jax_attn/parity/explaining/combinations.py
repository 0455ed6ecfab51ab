"""Combine choices, the likeliest first."""

from collections.abc import Iterator, Sequence
from typing import Any


def likeliest(choices: Sequence[Sequence[Any]]) -> Iterator[tuple[Any, ...]]:
    """Yield combinations of one item of each list, by the sum of the positions in their lists."""
    for total in range(sum(len(each) - 1 for each in choices) + 1):
        yield from _at_rank(total, choices)


def _at_rank(total: int, choices: Sequence[Sequence[Any]]) -> Iterator[tuple[Any, ...]]:
    if not choices:
        yield from [()] if total == 0 else []
        return
    for rank, chosen in enumerate(choices[0][: total + 1]):
        for others in _at_rank(total - rank, choices[1:]):
            yield chosen, *others
