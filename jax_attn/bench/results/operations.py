"""Show where the two sides of a pair spend their time, side by side."""

from collections.abc import Sequence
from typing import NamedTuple

from jax_attn.bench.record import Measurement
from jax_attn.bench.results import words

ABOUT = (
    "The longest operations of a call, by the profilers of torch and JAX: the time of each on the "
    "thread that runs it, without the operations it calls, added up over layers; and its share of "
    "the sum. A fusion of XLA counts as one operation, under the module and kind of its last "
    "instruction."
)


class Line(NamedTuple):
    """An operation. module: its module's path, with {layer} for a layer's number, or ""."""

    module: str
    kind: str
    seconds: str
    share: str

    @property
    def place(self) -> str:
        return f"{self.module} {self.kind}".strip()


def by_side(rows: Sequence[Measurement]) -> dict[str, list[Line]]:
    """Return the operations of each implementation that has any, the longest first."""
    sides = {}
    for row in rows:
        if row.operations:
            total = sum(seconds for *_, seconds in row.operations)
            sides[row.implementation] = [
                Line(path, kind, words.seconds(seconds), words.percent(seconds / total))
                for path, kind, seconds in row.operations
            ]
    return sides


def sentences(rows: Sequence[Measurement], most: int = 4) -> list[str]:
    """Return one line for each implementation, with its `most` longest operations."""
    return [
        f"{name} spends "
        + ", ".join(
            f"{o.share} in {f'{o.module} ' * bool(o.module)}{o.kind}" for o in listed[:most]
        )
        for name, listed in by_side(rows).items()
    ]
