"""The built-in matrix: named rows, chosen so that every pair of levels occurs. NumPy only.

A row is one design in one dtype under one mask, on one shape, run under one transform. Designs and
masks are crossed in full (`FACTORS`), with most dtypes; eight small shapes and the transforms are
dealt to them so that each pair of levels is met that can be (`crossed`). A few rows more, on long
shapes, cross the edges of the tiles and pages as they are shipped (`at_tile_edges`). Calibration's
programs have shapes of their own in the same table.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations

from jax_attn.dtypes import DTYPES
from jax_attn.parity.run import TRANSFORMS


@dataclass(frozen=True)
class Size:
    """B batch, T and S query and key length, N and K query and key/value heads, D embed_dim."""

    B: int
    T: int
    S: int
    N: int
    K: int
    D: int

    @property
    def work(self) -> int:
        """What attention and its projections cost, in products of numbers, roughly."""
        return self.B * self.T * self.D * (self.S + self.D)


SHAPES = {
    # The matrix's. The seeds' own sizes have the seeds' heads, 8; K is what grouped attention
    # makes of them.
    "square": Size(B=2, T=8, S=8, N=6, K=3, D=24),
    "prime": Size(B=3, T=13, S=13, N=10, K=2, D=70),
    "cross": Size(B=2, T=5, S=11, N=6, K=3, D=42),
    "token": Size(B=2, T=1, S=1, N=6, K=3, D=30),
    "seed000": Size(B=2, T=5, S=5, N=8, K=2, D=64),
    "seed001": Size(B=32, T=10, S=10, N=8, K=4, D=64),
    "seed002": Size(B=2, T=10, S=10, N=8, K=2, D=512),
    "seed003": Size(B=1, T=10, S=10, N=8, K=4, D=512),
    # The matrix's that cross edges of the shipped tiles and pages: prime, and no more scores than
    # one edge needs. Tiles of keys; of queries; of both, where queries see in a band; of heads.
    "long_keys": Size(B=1, T=37, S=1031, N=4, K=2, D=12),
    "long_queries": Size(B=1, T=1031, S=37, N=4, K=2, D=12),
    "long_band": Size(B=1, T=521, S=263, N=4, K=2, D=12),
    "many_heads": Size(B=1, T=257, S=67, N=18, K=6, D=36),
    "two_pages": Size(B=1, T=523, S=523, N=4, K=2, D=12),
    # Calibration's: few scores, as each configuration is run some twenty times; yet so many rows
    # that a gradient has more than a few numbers, of whose error little could be said.
    "mha": Size(B=2, T=11, S=7, N=3, K=3, D=48),
    "gqa": Size(B=1, T=13, S=11, N=4, K=2, D=60),
    "mqa": Size(B=1, T=11, S=13, N=5, K=1, D=70),
    "512": Size(B=1, T=11, S=521, N=2, K=1, D=32),
    "1024": Size(B=1, T=7, S=1031, N=2, K=2, D=32),
    "2048": Size(B=1, T=5, S=2039, N=1, K=1, D=32),
}

TILE_EDGES = ("long_keys", "long_queries", "long_band", "many_heads", "two_pages")
"""The shapes that cross edges of the shipped tiles or pages; all others lie within one of each."""


@dataclass(frozen=True)
class Case:
    """One row. `design`: a key of `PORTED_DESIGNS`, a published design or a variant of one."""

    design: str
    dtype: str
    mask: str
    shape: str
    transform: str

    @property
    def name(self) -> str:
        return "-".join((self.design, self.dtype, self.mask, self.shape, self.transform))

    @property
    def family(self) -> str:
        """The published design."""
        return self.design.partition("/")[0]

    @property
    def size(self) -> Size:
        return SHAPES[self.shape]

    @property
    def levels(self) -> tuple[tuple[str, str], ...]:
        """(factor, level) of each factor; a variant counts as its design."""
        own = ("dtype", "mask", "shape", "transform")
        return ("design", self.family), *((factor, getattr(self, factor)) for factor in own)

    @property
    def preparation(self) -> tuple[str, ...]:
        """Rows alike in all but their transform share what the reference's side computes."""
        return (self.design, self.dtype, self.mask, self.shape)


@dataclass(frozen=True)
class Factors:
    """The levels that a design is crossed over; `deals` shapes for each dtype and mask."""

    masks: tuple[str, ...]
    shapes: tuple[str, ...]
    dtypes: tuple[str, ...] = DTYPES
    deals: int = 1


_BOOLEAN = ("none", "causal", "padding", "per_head", "window", "empty_row")
_BOTH = "causal_padding"
_SELF = ("square", "prime", "token", "seed000", "seed001")
_CROSS = (*_SELF, "cross")
_MAIN = ("float32", "bfloat16")
_REST = ("float16", "float64")
_LOW = ("float32", "float16", "bfloat16")
_LONG = ("prime", "square")  # enough tokens to be read in several pieces

# The wide shapes are run by the design whose seed has them: there they cost most and add least.
FACTORS = {
    "weights_mha": Factors(tuple(m for m in (*_BOOLEAN, "zero_one") if m != "per_head"), _SELF),
    "fused_mha": Factors(("none",), _SELF, deals=2),
    "masked_mha": Factors((*_BOOLEAN, "zero_one"), (*_SELF, "seed002")),
    "mqa": Factors((*_BOOLEAN, "zero_one"), (*_SELF, "seed002")),
    "plain_mha": Factors(("none",), (*_SELF, "seed003"), deals=2),
    "torch_mha": Factors((*_BOOLEAN, "bias", _BOTH), (*_CROSS, "seed003")),
    "gqa": Factors((*_BOOLEAN, "bias", "sliding", _BOTH), (*_CROSS, "seed002")),
    "plain_mha/pipeline": Factors(("none",), ("square", "seed003")),
    "torch_mha/sequence_first": Factors(("none", "causal", "padding"), ("cross", "prime"), _MAIN),
    "torch_mha/no_bias": Factors(("none", "window"), ("prime", "cross"), _MAIN),
    "torch_mha/kdim_vdim": Factors(("none", "padding", "bias"), ("cross", "prime"), _MAIN),
    "torch_mha/weights": Factors(("none", "causal", "empty_row"), ("prime", "cross"), _MAIN),
    "torch_mha/mean_weights": Factors(("none", "padding"), ("prime", "cross"), _MAIN),
    "gqa/softcap": Factors(("none", "causal", "bias", "empty_row"), ("cross", "prime"), _MAIN),
    "gqa/no_bias": Factors(("none", "per_head"), ("prime", "cross"), _MAIN),
    "gqa/kdim_vdim": Factors(("none", "padding"), ("cross", "prime"), _MAIN),
    "gqa/head_dim_scale": Factors(("none", "window"), ("cross", "prime"), _MAIN),
    "gqa/rotary": Factors(("causal",), ("prime", "cross")),
    "gqa/rotary_interleaved_partial": Factors(("padding",), ("cross", "prime"), _LOW),
    # Where the norms' gradients have power in bfloat16: on "prime" and "cross" they have not.
    "gqa/qk_norm": Factors(("none",), ("square", "seed000"), _MAIN),
    "gqa/qk_layer_norm": Factors(("causal",), ("cross", "prime"), ("float32",)),
    "gqa/dropout": Factors(("dropout",), ("cross", "prime")),
    # In a sliding window the cache is a ring.
    "gqa/cached": Factors(("causal", "sliding"), _LONG, _MAIN),
    "gqa/cached_ragged": Factors(("causal", "sliding"), _LONG, ("float32",)),
    "gqa/cached_rotary": Factors(("causal",), _LONG, ("float32",)),
    "weights_mha/cached": Factors(("causal",), _LONG, ("float32",)),
    "masked_mha/cached": Factors(("causal",), _LONG, ("float32",)),
    "mqa/cached": Factors(("sliding",), _LONG, ("float32",)),
    "torch_mha/cached": Factors(("causal",), _LONG, ("float32",)),
    "torch_mha/extra_keys": Factors(("none", "padding"), ("cross", "prime"), _MAIN),
    "torch_mha/extra_keys_weights": Factors(("empty_row",), ("prime", "cross"), ("float32",)),
    "gqa/extra_keys": Factors(("per_head", "bias", "empty_row"), ("cross", "prime"), ("float32",)),
    # Where the sinks' gradient has power in bfloat16: on "prime" it has not.
    "gqa/sinks": Factors(("window", "empty_row"), ("cross",), _MAIN),
    "gqa/extra_keys_dropout": Factors(("dropout",), ("cross", "prime"), ("float32",)),
    "gqa/cached_extra_keys": Factors(("causal", "sliding"), _LONG, ("float32",)),
}

# Eager compiles every operation by itself; wide and long shapes take the oracle's side longest.
_DEAR = frozenset(("eager", "seed001", "seed002", "seed003"))

# How many transforms each (design, dtype, mask, shape) is run under.
REPEATS = 2


# (design, mask, shape) of the rows that cross edges of the shipped tiles and pages. In float32,
# where an edge's mistake shows best, and compiled once: forward and backward in one program.
_AT_TILE_EDGES = (
    ("gqa", "none", "long_keys"),
    ("gqa", "bias", "long_keys"),
    ("gqa/dropout", "dropout", "long_keys"),
    ("gqa", "none", "long_queries"),
    ("gqa", "causal", "long_band"),
    ("gqa", "padding", "many_heads"),
    ("gqa/cached", "causal", "two_pages"),
)


def at_tile_edges() -> tuple[Case, ...]:
    """The rows that run the blocked kernel and the cache as they are shipped, past their edges."""
    return tuple(Case(d, "float32", mask, shape, "grad") for d, mask, shape in _AT_TILE_EDGES)


def matrix() -> tuple[Case, ...]:
    """Every row, in order; the same each time."""
    return crossed() + at_tile_edges()


@cache
def crossed() -> tuple[Case, ...]:
    """The rows on small shapes, in which each pair of levels is met."""
    met: set[frozenset] = set()
    rows: list[Case] = []
    for design, factors in FACTORS.items():
        for mask in factors.masks:
            for dtype in _dealt(factors, mask):
                shape, transforms = _deal(met, rows, design, dtype, mask, factors.shapes)
                new = [Case(design, dtype, mask, shape, t) for t in transforms]
                met |= set().union(*map(pairs, new))
                rows += new
    while missing := reachable() - met:
        case = max(_all(), key=lambda c: len(pairs(c) & missing))
        met |= pairs(case)
        rows.append(case)
    # Rows of one preparation stand together.
    order = list(FACTORS)
    return tuple(sorted(rows, key=lambda c: (order.index(c.design), *c.preparation)))


def _dealt(factors: Factors, mask: str) -> tuple[str, ...]:
    """Float32 and bfloat16 under every mask; float16 and float64 each under every fourth."""
    if len(factors.masks) == 1 or factors.dtypes != DTYPES:
        return factors.dtypes * factors.deals
    place = factors.masks.index(mask)
    return (*_MAIN, *(_REST[place // 2 % 2 : place // 2 % 2 + 1] if place % 2 == 0 else ()))


# Float32 alone: bfloat16's operands a TPU's matrix unit takes as they are.
EMULATED_SHAPE, _EMULATED_MASKS = "prime", ("none", "causal")


# The kernels that are compiled for TPUs beside the published designs.
COMPILED_KERNELS = ("blocked", "splash")


def published() -> tuple[str, ...]:
    """The published designs, without their variants, which share their kernels."""
    return tuple(name for name in FACTORS if "/" not in name)


def emulated() -> tuple[Case, ...]:
    """Each published design, without a mask and, where it takes one, causal."""
    return tuple(
        Case(design, "float32", mask, EMULATED_SHAPE, "emulated")
        for design in published()
        for mask in _EMULATED_MASKS
        if mask in FACTORS[design].masks
    )


def pairs(case: Case) -> set[frozenset]:
    """Every pair of levels that the row meets."""
    return {frozenset(pair) for pair in combinations(case.levels, 2)}


@cache
def reachable() -> frozenset[frozenset]:
    """Every pair of levels that some row could meet."""
    return frozenset().union(*(pairs(case) for case in _all()))


def _all() -> Iterator[Case]:
    for design, f in FACTORS.items():
        for dtype in f.dtypes:
            for mask in f.masks:
                for shape in f.shapes:
                    yield from (Case(design, dtype, mask, shape, t) for t in TRANSFORMS)


def _deal(
    met: set[frozenset],
    rows: Sequence[Case],
    design: str,
    dtype: str,
    mask: str,
    shapes: tuple[str, ...],
) -> tuple[str, tuple[str, ...]]:
    """The shape and the transforms that meet most pairs not yet met; else the least dear."""
    used = [row.shape for row in rows] + [row.transform for row in rows]

    def worth(shape: str, transforms: tuple[str, ...]) -> tuple[int, int, int]:
        cases = [Case(design, dtype, mask, shape, t) for t in transforms]
        new = set().union(*map(pairs, cases)) - met
        spread = used.count(shape) + sum(map(used.count, transforms))
        return len(new), -len(_DEAR & {shape, *transforms}), -spread

    taken = {(c.shape, c.transform) for c in rows if c.preparation[:3] == (design, dtype, mask)}
    choices = [
        (s, ts)
        for s in shapes
        for ts in combinations(TRANSFORMS, REPEATS)
        if not taken & {(s, t) for t in ts}
    ]
    return max(choices, key=lambda choice: worth(*choice))
