"""The hundred programs that calibration runs, and which configuration has which. NumPy only.

A program is what is compiled: a module of one shape and dtype, a kernel, a kind of call.
Configuration `number` of a seed has a program by its number and data from (seed, number) alone, so
that any one can be run again by itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np

from jax_attn.dtypes import DTYPES
from jax_attn.parity.matrix.cases import SHAPES, Size


@dataclass(frozen=True)
class Program:
    """A program that is compiled.

    kind: core (attention, scores written out), blocked (tile by tile) or module (a pre-norm block,
    by either kernel). design: of `PORTED_DESIGNS`, or "block". call: "arrays", who sees whom and
    what is added as data; else a kind of `MASKS` that the kernel knows. tile: of queries and keys,
    where the kernel is the blocked one. unit: the matrix unit emulated.
    """

    kind: str
    design: str
    dtype: str
    shape: str
    call: str = "arrays"
    tile: tuple[int, int] | None = None
    unit: str | None = None

    @property
    def size(self) -> Size:
        return SHAPES[self.shape]

    @property
    def precision(self) -> str:
        """The budget's."""
        return self.unit or self.dtype

    @property
    def name(self) -> str:
        tile = "" if self.tile is None else "-{}x{}".format(*self.tile)
        return f"{self.precision}-{self.kind}{tile}-{self.design}-{self.shape}-{self.call}"


_DESIGNS = (
    ("gqa", "mha", "arrays", (3, 4)),
    ("gqa", "gqa", "arrays", (2, 5)),
    ("gqa", "mqa", "arrays", (5, 3)),
    ("gqa", "gqa", "causal_padding", (3, 4)),
    ("gqa/softcap", "mqa", "arrays", (2, 4)),
    ("gqa/rotary", "gqa", "arrays", (3, 5)),
    ("gqa", "512", "arrays", (2, 96)),
)
_OTHERS = {
    "core": (("gqa/qk_norm", "mha", "arrays", None),),
    "blocked": (("gqa", "mha", "window", (2, 3)),),
}
_LONG = (("gqa", "1024", "arrays", (3, 200)), ("gqa", "2048", "arrays", (2, 512)))
_BLOCKS = tuple(product(("mha", "gqa", "mqa"), (None, (3, 4))))


@cache
def programs() -> tuple[Program, ...]:
    """A hundred; one of each emulated unit and kernel, so that they get 4% of all."""
    every: list[Program] = []
    for dtype, (kind, others) in product(DTYPES, _OTHERS.items()):
        long = _LONG if dtype in ("float32", "bfloat16") else ()
        for design, shape, call, tile in (*_DESIGNS, *others, *long):
            tile = tile if kind == "blocked" else None
            every.append(Program(kind, design, dtype, shape, call, tile))
    every += [
        Program("module", "block", dtype, shape, tile=tile)
        for dtype, (shape, tile) in product(DTYPES, _BLOCKS)
    ]
    every += [
        Program(kind, "gqa", "float32", "gqa", tile=tile, unit=unit)
        for unit, (kind, tile) in product(("mxu", "tf32"), (("core", None), ("blocked", (3, 4))))
    ]
    return tuple(every)


# Coprime to a hundred: neighbours in number are unlike.
STRIDE = 37


@dataclass(frozen=True)
class Configuration:
    """One of those that a seed gives."""

    number: int
    seed: int

    @property
    def program(self) -> Program:
        return programs()[STRIDE * self.number % len(programs())]

    @property
    def name(self) -> str:
        return f"{self.program.name}-{self.number:05}"

    @property
    def plants(self) -> bool:
        """Whether bugs are planted in it: in every thirtieth of the blocked kernel's and blocks."""
        return self.program.kind != "core" and self.number // len(programs()) % 30 == 0

    def rng(self) -> np.random.Generator:
        return np.random.default_rng([self.seed, self.number])


def configurations(
    count: int, seed: int, dtypes: Sequence[str] = (), pattern: str = ""
) -> list[Configuration]:
    """The first `count` of a seed, of which those in `dtypes` and with `pattern` in their name."""
    drawn = (Configuration(number, seed) for number in range(count))
    return [c for c in drawn if (not dtypes or c.program.dtype in dtypes) and pattern in c.name]
