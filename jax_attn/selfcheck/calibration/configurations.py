"""The hundred programs that calibration runs, and the configurations of each. NumPy only.

A program is a unit of compilation: a module of one shape and dtype, a kernel, a kind of call. The
number of a configuration determines its program, and (seed, number) its data, so that any
configuration can be run again by itself.
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
class PortProgram:
    """A program that is compiled.

    kind: core (attention, scores written out), blocked (tile by tile), module (a pre-norm block,
    by either kernel) or eager (a pre-norm block whose attention is written out on both sides).
    design: in `PORTED_DESIGNS` or `ANATOMIES`. call: "arrays" if mask and bias are arrays, else a
    kind of `MASKS` that the kernel knows. tile: that of queries and keys for the blocked kernel.
    unit: the emulated matrix unit.
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
        """The precision of the budget."""
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
# bfloat16 has long rows only once, in `_ATTENTION`: the backward pass of jax.nn.softmax sums 500
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
def programs() -> tuple[PortProgram, ...]:
    """Return all hundred: 48 of attention, 12 fused blocks, 35 written-out blocks, 5 emulated."""
    every = [
        PortProgram(kind, design, dtype, shape, call, tile)
        for dtype, (kind, designs) in product(DTYPES, _ATTENTION.items())
        for design, shape, call, tile in designs
    ]
    every += [
        PortProgram(kind, "gqa", dtype, shape, tile=tile)
        for dtype in DTYPES
        for kind, shape, tile in _BY_LENGTH[dtype]
    ]
    every += [
        PortProgram("module", "block", dtype, shape, tile=tile)
        for dtype, (shape, tile) in product(DTYPES, _FUSED)
    ]
    every += [
        PortProgram("eager", design, dtype, shape)
        for dtype, (design, shape) in product(DTYPES, _WRITTEN_OUT)
        if (design, dtype) != ("masked_fill", "float16")  # torch refuses -1e9 in float16
    ]
    every += [
        PortProgram(kind, "gqa", "float32", "gqa", tile=tile, unit=unit)
        for unit, (kind, tile) in product(("mxu", "tf32"), _EMULATED)
    ]
    return (*every, PortProgram("eager", "masked_fill", "float32", "gqa", unit="mxu"))


# Coprime to a hundred, so that configurations with successive numbers differ.
STRIDE = 37


FINER = {
    "bfloat16": "float32",
    "float16": "float32",
    "mxu": "float32",
    "tf32": "float32",
    "float32": "float64",
    "float64": "float64",
}
"""precision -> the next finer one, which keeps what the first loses to rounding."""
_MILDEST = "bfloat16"


@dataclass(frozen=True)
class Configuration:
    """One configuration of a seed.

    without_cause: whether it is judged without the coarseness of its precision, which may have made
    it INCONCLUSIVE: the same data is judged in the next finer precision. Since there is none finer
    than float64, other data is drawn there, as mild as for the coarsest precision.
    """

    number: int
    seed: int
    without_cause: bool = False

    @property
    def drawn_as(self) -> PortProgram:
        """The program that the number determines, for which the data is drawn."""
        return programs()[STRIDE * self.number % len(programs())]

    @property
    def program(self) -> PortProgram:
        """The program that runs it."""
        drawn = self.drawn_as
        if not self.without_cause:
            return drawn
        return replace(drawn, dtype=FINER[drawn.precision], unit=None)

    @property
    def limits(self) -> str:
        """The precision whose limits bound the data."""
        own = self.drawn_as.precision
        return _MILDEST if self.without_cause and FINER[own] == own else own

    @property
    def name(self) -> str:
        return f"{self.program.name}-{self.number:05}"

    @property
    def plants(self) -> bool:
        """True if bugs are planted: in every thirtieth round of programs, except the kind core."""
        blind = self.without_cause or self.program.kind == "core"
        return not blind and self.number // len(programs()) % 30 == 0

    def rng(self) -> np.random.Generator:
        return np.random.default_rng([self.seed, self.number])


def configurations(
    count: int, seed: int, dtypes: Sequence[str] = (), pattern: str = ""
) -> list[Configuration]:
    """Return those of the first `count` with a dtype in `dtypes` and `pattern` in their name."""
    drawn = (Configuration(number, seed) for number in range(count))
    return [c for c in drawn if (not dtypes or c.program.dtype in dtypes) and pattern in c.name]
