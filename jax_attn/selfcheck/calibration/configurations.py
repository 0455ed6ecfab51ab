"""The hundred programs that calibration runs, and which configuration has which. NumPy only.

A program is what is compiled: a module of one shape and dtype, a kernel, a kind of call.
Configuration `number` of a seed has a program by its number and data from (seed, number) alone, so
that any one can be run again by itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import numpy as np

from jax_attn.dtypes import DTYPES
from jax_attn.selfcheck.calibration.anatomies import ANATOMIES
from jax_attn.selfcheck.matrix.cases import SHAPES, Size


@dataclass(frozen=True)
class Program:
    """A program that is compiled.

    kind: core (attention, scores written out), blocked (tile by tile), module (a pre-norm block,
    by either kernel) or eager (one whose attention is written out on both sides). design: of
    `PORTED_DESIGNS`, or of `ANATOMIES`. call: "arrays", who sees whom and
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
    def is_block(self) -> bool:
        return self.design in ANATOMIES

    @property
    def precision(self) -> str:
        """The budget's."""
        return self.unit or self.dtype

    @property
    def name(self) -> str:
        tile = "" if self.tile is None else "-{}x{}".format(*self.tile)
        return f"{self.precision}-{self.kind}{tile}-{self.design}-{self.shape}-{self.call}"


# (design, shape, call, tile)
_ATTENTION = {
    "core": (
        ("gqa", "mha", "arrays", None),
        ("gqa", "gqa", "causal_padding", None),
        ("gqa/rotary", "gqa", "arrays", None),
        ("gqa/qk_norm", "mha", "arrays", None),
        ("gqa", "512", "arrays", None),
    ),
    "blocked": (
        ("gqa", "gqa", "arrays", (2, 5)),
        ("gqa", "mqa", "arrays", (5, 3)),
        ("gqa", "gqa", "causal_padding", (3, 4)),
        ("gqa/softcap", "mqa", "arrays", (2, 4)),
        ("gqa", "mha", "window", (2, 3)),
    ),
}
# bfloat16 has long rows only once, in `_ATTENTION`: the backward pass of jax.nn.softmax adds up 500
# keys in bfloat16, and a budget that allows for that says little about the gradients of queries.
_LONG = (("blocked", "512", (2, 96)), ("core", "1024", None), ("blocked", "2048", (2, 512)))
_SHORT = (("blocked", "mha", (3, 4)), ("core", "gqa", None), ("core", "mqa", None))
_BY_LENGTH = {"float64": _LONG[:1], "float32": _LONG, "float16": _LONG[:1], "bfloat16": _SHORT}
_FUSED = (("mha", None), ("gqa", (3, 4)), ("mqa", None))
_WRITTEN_OUT = (
    ("masked_fill", "gqa"),
    ("finfo_min", "mha"),
    ("finfo_min", "gqa"),
    ("minus_1e4", "mha"),
    ("where", "gqa"),
    ("buckets", "mha"),
    ("buckets", "gqa"),
    ("gated", "gqa"),
    ("experts", "mha"),
)
_EMULATED = (("core", None), ("blocked", (3, 4)))


@cache
def programs() -> tuple[Program, ...]:
    """A hundred: 48 of attention, 12 of fused blocks, 35 of blocks written out, 5 emulated."""
    every = [
        Program(kind, design, dtype, shape, call, tile)
        for dtype, (kind, designs) in product(DTYPES, _ATTENTION.items())
        for design, shape, call, tile in designs
    ]
    every += [
        Program(kind, "gqa", dtype, shape, tile=tile)
        for dtype in DTYPES
        for kind, shape, tile in _BY_LENGTH[dtype]
    ]
    every += [
        Program("module", "block", dtype, shape, tile=tile)
        for dtype, (shape, tile) in product(DTYPES, _FUSED)
    ]
    every += [
        Program("eager", design, dtype, shape)
        for dtype, (design, shape) in product(DTYPES, _WRITTEN_OUT)
        if (design, dtype) != ("masked_fill", "float16")  # which holds no -1e9: torch refuses
    ]
    every += [
        Program(kind, "gqa", "float32", "gqa", tile=tile, unit=unit)
        for unit, (kind, tile) in product(("mxu", "tf32"), _EMULATED)
    ]
    return (*every, Program("eager", "masked_fill", "float32", "gqa", unit="mxu"))


# Coprime to a hundred: neighbours in number are unlike.
STRIDE = 37


FINER = {
    "bfloat16": "float32",
    "float16": "float32",
    "mxu": "float32",
    "tf32": "float32",
    "float32": "float64",
    "float64": "float64",
}
"""precision -> the next finer one, which holds what is lost to rounding in the first."""
_MILDEST = "bfloat16"


@dataclass(frozen=True)
class Configuration:
    """One configuration of a seed.

    without_cause: whether it is judged without what may have made it INCONCLUSIVE, the coarseness
    of its precision: the same data is judged in the next finer precision. As there is none finer
    than float64, other data is drawn there, as mild as for the coarsest precision.
    """

    number: int
    seed: int
    without_cause: bool = False

    @property
    def drawn_as(self) -> Program:
        """The program that the seed gives it, for which its data is drawn."""
        return programs()[STRIDE * self.number % len(programs())]

    @property
    def program(self) -> Program:
        """The program that runs it."""
        drawn = self.drawn_as
        if not self.without_cause:
            return drawn
        return replace(drawn, dtype=FINER[drawn.precision], unit=None)

    @property
    def limits(self) -> str:
        """The precision within whose limits its data is drawn."""
        own = self.drawn_as.precision
        return _MILDEST if self.without_cause and FINER[own] == own else own

    @property
    def name(self) -> str:
        return f"{self.program.name}-{self.number:05}"

    @property
    def plants(self) -> bool:
        """Whether bugs are planted in it: in every thirtieth of the blocked kernel's and blocks."""
        blind = self.without_cause or self.program.kind == "core"
        return not blind and self.number // len(programs()) % 30 == 0

    def rng(self) -> np.random.Generator:
        return np.random.default_rng([self.seed, self.number])


def configurations(
    count: int, seed: int, dtypes: Sequence[str] = (), pattern: str = ""
) -> list[Configuration]:
    """The first `count` of a seed, of which those in `dtypes` and with `pattern` in their name."""
    drawn = (Configuration(number, seed) for number in range(count))
    return [c for c in drawn if (not dtypes or c.program.dtype in dtypes) and pattern in c.name]
