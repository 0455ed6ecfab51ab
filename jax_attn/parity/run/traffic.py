"""What a compiled program sends between devices."""

import math
import re
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

KINDS = (
    *("all-reduce", "all-gather", "ragged-all-to-all", "all-to-all", "reduce-scatter"),
    *("collective-permute", "collective-broadcast", "send", "recv"),
)

# An asynchronous operation is a pair, -start and -done: the second has the result alone.
_OPERATION = re.compile(rf"= ([^\n]*?) ({'|'.join(KINDS)})(?:-done)?\(")
_SHAPE = re.compile(r"([a-z]+)(\d*)[a-z0-9]*\[([\d,]*)\]")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) [^\n]*\{$")
_CALLED = re.compile(
    r"(?:body|condition|to_apply|calls|true_computation|false_computation)=%?([\w.-]+)"
    r"|branch_computations=\{([^}]*)\}"
)
_TURNS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


class Sent(NamedTuple):
    """kind: one of KINDS. bytes: of its result on each device, each time. times: how often."""

    kind: str
    bytes: int
    times: int = 1


def sent(hlo: str) -> list[Sent]:
    """The collective operations in a compiled program's text, in its order.

    One in a loop counts for each of its turns; of a loop whose length is not known, once.
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
        """How often a computation is run; the entry, which nothing calls, once."""
        return sum(times(caller) * turns for caller, turns in callers.get(name, ())) or 1

    return [
        Sent(kind, sum(_size(*shape) for shape in _SHAPE.findall(result)), times(name))
        for name, line in lines
        for result, kind in _OPERATION.findall(line)
    ]


def total(operations: list[Sent]) -> int:
    """Bytes of all the operations."""
    return sum(each.bytes * each.times for each in operations)


def _lines(hlo: str) -> Iterator[tuple[str, str]]:
    """Each line, with the name of the computation that it is in."""
    name = ""
    for line in hlo.splitlines():
        if found := _COMPUTATION.match(line):
            name = found[2]
        yield name, line


def _size(letters: str, bits: str, shape: str) -> int:
    """Bytes of an array, as f32[3,5] has 60."""
    count = math.prod(int(n) for n in shape.split(",") if n)
    return count if letters == "pred" else count * int(bits or 0) // 8
