"""The collective operations by which a compiled program sends data between devices."""

import math
import re
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

KINDS = (
    *("all-reduce", "all-gather", "ragged-all-to-all", "all-to-all", "reduce-scatter"),
    *("collective-permute", "collective-broadcast", "send", "recv"),
)

# An asynchronous operation is a pair, -start and -done; only -done has just the result's type.
_OPERATION = re.compile(rf"= ([^\n]*?) ({'|'.join(KINDS)})(?:-done)?\(")
_SHAPE = re.compile(r"([a-z]+)(\d*)[a-z0-9]*\[([\d,]*)\]")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) [^\n]*\{$")
_CALLED = re.compile(
    r"(?:body|condition|to_apply|calls|true_computation|false_computation)=%?([\w.-]+)"
    r"|branch_computations=\{([^}]*)\}"
)
_TURNS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


class Sent(NamedTuple):
    """A collective. kind: one of KINDS. bytes: size of its result on each device, each time.
    times: how often it runs."""

    kind: str
    bytes: int
    times: int = 1


def sent(hlo: str) -> list[Sent]:
    """Return the collective operations in a compiled program's text, in order.

    An operation in a loop counts once per iteration, or once if the trip count is unknown.
    """
    lines = [*_lines(hlo)]
    callers: dict[str, list[tuple[str, int]]] = {}
    for name, line in lines:
        turns = int(found[1]) if (found := _TURNS.search(line)) else 1
        for one, several in _CALLED.findall(line):
            for callee in [one] if one else re.findall(r"[\w.-]+", several):
                callers.setdefault(callee, []).append((name, turns))

    @cache
    def times(name: str) -> int:
        """Return how often a computation runs; the entry, which has no caller, runs once."""
        return sum(times(caller) * turns for caller, turns in callers.get(name, ())) or 1

    return [
        Sent(kind, sum(_size(*shape) for shape in _SHAPE.findall(result)), times(name))
        for name, line in lines
        for result, kind in _OPERATION.findall(line)
    ]


def total(operations: list[Sent]) -> int:
    """Return the total bytes of the operations' results on each device."""
    return sum(each.bytes * each.times for each in operations)


def _lines(hlo: str) -> Iterator[tuple[str, str]]:
    """Yield each line, with the name of the computation that contains it."""
    name = ""
    for line in hlo.splitlines():
        if found := _COMPUTATION.match(line):
            name = found[2]
        yield name, line


def _size(letters: str, bits: str, shape: str) -> int:
    """Return the bytes of an array: for f32[3,5], 60."""
    count = math.prod(int(n) for n in shape.split(",") if n)
    return count if letters == "pred" else count * int(bits or 0) // 8
