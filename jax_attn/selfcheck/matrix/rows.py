"""The rows of the built-in matrix, chosen so that every pair of levels occurs. NumPy only.

`default` has few rows, which contain every possible pair of levels. `matrix` adds the rest: designs
and masks are fully crossed (`FACTORS`), with most dtypes, and each combination is run under several
transforms. In both, a few rows on long shapes cross the edges of the shipped tiles and pages.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, combinations

import numpy as np

from jax_attn.dtypes import DTYPES
from jax_attn.parity.run import TRANSFORMS
from jax_attn.selfcheck.matrix.cases import Case


@dataclass(frozen=True)
class Factors:
    """The levels that a design is crossed with; `deals` shapes for each dtype and mask."""

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

# The wide shapes cost most and add least; only the design whose seed has one runs it.
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
    # On "prime" and "cross" the norms' gradients have no power in bfloat16.
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
    # On "prime" the sinks' gradient has no power in bfloat16.
    "gqa/sinks": Factors(("window", "empty_row"), ("cross",), _MAIN),
    "gqa/extra_keys_dropout": Factors(("dropout",), ("cross", "prime"), ("float32",)),
    "gqa/cached_extra_keys": Factors(("causal", "sliding"), _LONG, ("float32",)),
}

# Eager compiles every operation separately; on wide and large shapes the oracle takes longest.
_DEAR = frozenset(("eager", "seed001", "seed002", "seed003"))

# The number of transforms for each (design, dtype, mask) in the whole matrix.
REPEATS = 2

# (design, mask, shape) of the rows that cross edges of the shipped tiles and pages. They run in
# float32, in which a mistake at an edge shows best, with forward and backward in one program.
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
    """Return the rows that run the shipped blocked kernel and cache across their tiles' edges."""
    return tuple(Case(d, "float32", mask, shape, "grad") for d, mask, shape in _AT_TILE_EDGES)


def default() -> tuple[Case, ...]:
    """Return the rows of `verify` without --all: `covering`, and one row of each long shape."""
    of_each_shape = {case.shape: case for case in reversed(at_tile_edges())}
    return covering() + tuple(reversed(of_each_shape.values()))


def matrix() -> tuple[Case, ...]:
    """Return every row, including those of `default`, always in the same order."""
    return crossed() + at_tile_edges()


@cache
def covering() -> tuple[Case, ...]:
    """Return few rows on small shapes that contain each pair of levels and each variant.

    A variant that takes masks is run under one that hides keys. The choice is greedy: each row adds
    most for its cost, where levels that few rows could add count more; then superfluous rows are
    removed, the most expensive first. The fewest possible rows would be hard to find.
    """
    cases = [*_all()]
    adds = [_covered(case) for case in cases]
    cost = np.array([_cost(case) for case in cases])
    having: dict[object, list[int]] = {}
    for n, things in enumerate(adds):
        for thing in things:
            having.setdefault(thing, []).append(n)
    # Integers, because they are summed in the order of a set, which differs between processes.
    worth = {thing: round(2**40 * len(having[thing]) ** -0.5) for thing in having}
    gain = np.array([sum(worth[thing] for thing in things) for things in adds])
    missing, chosen = {*having}, list[int]()
    while missing:
        chosen.append(best := int((gain / cost).argmax()))
        for thing in adds[best] & missing:
            gain[having[thing]] -= worth[thing]
        missing -= adds[best]
    times = Counter(chain.from_iterable(adds[n] for n in chosen))
    for n in sorted(chosen, key=cost.__getitem__, reverse=True):
        if all(times[thing] > 1 for thing in adds[n]):
            chosen.remove(n)
            times.subtract(adds[n])
    return _in_order([cases[n] for n in chosen])


@cache
def crossed() -> tuple[Case, ...]:
    """Return the rows on small shapes: those of `covering`, and every fully crossed combination.

    Each combination gets its shape and transforms so that all are used about equally often.
    """
    rows = list(covering())
    used = Counter(level for case in rows for level in (case.shape, case.transform))
    for design, factors in FACTORS.items():
        for mask in factors.masks:
            for dtype in _dtypes(factors, mask):
                own = [c for c in rows if c.preparation[:3] == (design, dtype, mask)]
                while _complete(own) < factors.deals:
                    new = _deal(own, used, Case(design, dtype, mask, "", ""), factors.shapes)
                    used.update(level for case in new for level in (case.shape, case.transform))
                    rows, own = rows + new, own + new
    return _in_order(rows)


def _in_order(rows: list[Case]) -> tuple[Case, ...]:
    """Sort by design, as in `FACTORS`; rows of one preparation are adjacent."""
    order = list(FACTORS)
    return tuple(sorted(rows, key=lambda c: (order.index(c.design), *c.preparation)))


def _covered(case: Case) -> set[object]:
    """Return what a row covers: its pairs of levels, its variant, and a mask that hides keys."""
    hides = case.mask not in ("none", "bias", "dropout")
    return {*pairs(case), case.design} | ({(case.design, "hides keys")} if hides else set())


def _cost(case: Case) -> float:
    """Return the measured CPU seconds of a row, roughly; most of them are compilation."""
    seconds = 1.3 + 1.7 * (case.transform == "eager") + 0.2 * case.shape.startswith("seed00")
    if "cached" in case.design:
        # There is a program for each piece, and jit has the forward pass twice.
        seconds += 3.5 + (case.transform == "jit") + case.size.T / 4 * (case.transform == "eager")
        seconds += 3 * (case.shape == "prime")
    return seconds


def seconds(cases: Sequence[Case]) -> float:
    """Return the expected CPU seconds, roughly, of all rows of one preparation.

    Unlike `_cost`, which chooses among small shapes, this distinguishes wide and long ones: the
    remaining time is estimated from the first rows that run.
    """
    size = cases[0].size
    wide, scores = (size.D / 512) ** 2, size.B * size.N * size.T * size.S / 2**17
    eager = sum(case.transform == "eager" for case in cases)
    cached = "cached" in cases[0].design
    return len(cases) + 1.3 * wide + 1.5 * scores + eager * (1 + 2.2 * wide) + 4 * cached


def _dtypes(factors: Factors, mask: str) -> tuple[str, ...]:
    """Return float32 and bfloat16 for every mask; float16 and float64 for every fourth each.

    A design with a single mask or its own dtypes has all of its dtypes.
    """
    if len(factors.masks) == 1 or factors.dtypes != DTYPES:
        return factors.dtypes
    place = factors.masks.index(mask)
    return (*_MAIN, *(_REST[place // 2 % 2 : place // 2 % 2 + 1] if place % 2 == 0 else ()))


def _complete(rows: Iterable[Case]) -> int:
    """Return the number of shapes on which the rows have enough transforms."""
    return sum(count >= REPEATS for count in Counter(case.shape for case in rows).values())


def _deal(
    own: Sequence[Case], used: Counter[str], row: Case, shapes: tuple[str, ...]
) -> list[Case]:
    """Return `row` on one more shape under enough transforms, the cheapest and least used.

    own: the rows of this design, dtype and mask so far. A shape that has one of them is preferred:
    both share the reference's side.
    """
    choices = []
    for shape in shapes:
        taken = {case.transform for case in own if case.shape == shape}
        if len(taken) < REPEATS:
            free = [transform for transform in TRANSFORMS if transform not in taken]
            for chosen in combinations(free, REPEATS - len(taken)):
                levels = (shape, *chosen)
                rank = len(chosen), len(_DEAR.intersection(levels)), sum(used[x] for x in levels)
                choices.append((rank, levels))
    shape, *transforms = min(choices)[1]
    return [replace(row, shape=shape, transform=transform) for transform in transforms]


# Only float32 is emulated: a TPU's matrix unit takes bfloat16's operands unrounded.
EMULATED_SHAPE, _EMULATED_MASKS = "prime", ("none", "causal")


# The kernels that are compiled for TPUs in addition to the published designs.
COMPILED_KERNELS = ("blocked", "splash")


def published() -> tuple[str, ...]:
    """Return the published designs, without their variants, which share their kernels."""
    return tuple(name for name in FACTORS if "/" not in name)


def emulated() -> tuple[Case, ...]:
    """Return each published design without a mask and, if it has that mask, causal."""
    return tuple(
        Case(design, "float32", mask, EMULATED_SHAPE, "emulated")
        for design in published()
        for mask in _EMULATED_MASKS
        if mask in FACTORS[design].masks
    )


def emulated_by_default() -> tuple[Case, ...]:
    """Return one row of each published design, causal if it has that mask."""
    return tuple({case.design: case for case in emulated()}.values())


def pairs(case: Case) -> set[frozenset]:
    """Return every pair of levels in the row."""
    return {frozenset(pair) for pair in combinations(case.levels, 2)}


def _all() -> Iterator[Case]:
    for design, f in FACTORS.items():
        for dtype in f.dtypes:
            for mask in f.masks:
                for shape in f.shapes:
                    yield from (Case(design, dtype, mask, shape, t) for t in TRANSFORMS)
