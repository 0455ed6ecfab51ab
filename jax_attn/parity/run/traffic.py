"""What a compiled program sends between devices."""

import math
import re
from typing import NamedTuple

KINDS = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute")

# An asynchronous operation is a pair, -start and -done: the second has the result alone.
_OPERATION = re.compile(rf"= ([^\n]*?) ({'|'.join(KINDS)})(?:-done)?\(")
_SHAPE = re.compile(r"([a-z]+)(\d*)[a-z0-9]*\[([\d,]*)\]")


class Sent(NamedTuple):
    """kind: one of KINDS. bytes: of the result, on each device."""

    kind: str
    bytes: int


def sent(hlo: str) -> list[Sent]:
    """The collective operations in a compiled program's text, in its order."""
    return [
        Sent(kind, sum(_size(*shape) for shape in _SHAPE.findall(result)))
        for result, kind in _OPERATION.findall(hlo)
    ]


def _size(letters: str, bits: str, shape: str) -> int:
    """Bytes of an array, as f32[3,5] has 60."""
    count = math.prod(int(n) for n in shape.split(",") if n)
    return count if letters == "pred" else count * int(bits) // 8
