"""Draw the data of correct configurations for calibration. NumPy only.

Every drawn configuration is correct: no quantity of the formulas leaves the range of its dtype
(`Levels`).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from jax_attn.selfcheck.calibration.anatomies import ANATOMIES, PADDING, TOKENS
from jax_attn.selfcheck.calibration.configurations import Configuration, PortProgram
from jax_attn.selfcheck.matrix.cases import Size
from jax_attn.selfcheck.matrix.masks import MASKS, distance

Rng = np.random.Generator

# --- magnitudes -----------------------------------------------------------------------------------


class ValueLimits(NamedTuple):
    """The range of a precision, and how peaked attention may be.

    smallest, largest: RMS of any quantity. At `largest`, its largest element and a sum of thousands
    are still finite. At `smallest`, its product with a probability, one in thousands in peaked
    attention, is not yet lost: float32's subnormals are flushed, all towards 0, so that their sums
    are off by more than rounding. scores: largest standard deviation: an error of
    `roundoff * score` in a score causes as large a relative error in every probability. offset:
    largest mean over standard deviation, which loses as much if it cancels. Beyond the last two,
    correct code still does not fail, but more and more of it is INCONCLUSIVE: with bfloat16's
    scores of 30, a third.
    """

    smallest: float
    largest: float
    scores: float
    offset: float


# float64: judged values are squared, in float64, which limits their range.
LIMITS = {
    "float64": ValueLimits(1e-140, 1e140, 300.0, 1e4),
    "float32": ValueLimits(1e-28, 1e28, 30.0, 100.0),
    "float16": ValueLimits(1e-2, 200.0, 5.0, 3.0),
    "bfloat16": ValueLimits(1e-28, 1e28, 1.5, 1.0),
    "tf32": ValueLimits(1e-28, 1e28, 5.0, 3.0),
    "mxu": ValueLimits(1e-28, 1e28, 1.5, 1.0),
}
_FLAT = 0.05


@dataclass(frozen=True)
class Levels:
    """RMS of the inputs, standard deviation of the scores, RMS of values and output."""

    x: float
    scores: float
    v: float
    o: float

    @property
    def all(self) -> tuple[float, ...]:
        """The levels of all states, weights and gradients for cotangents of level 1."""
        x, a, v, o = self.x, math.sqrt(self.scores), self.v, self.o
        return (x, v, o, a / x, v / x, o / v, o * a, o * a * x, o * a * a / x, o / x, o * x / v)


def _between(rng: Rng, low: float, high: float) -> float:
    """Draw uniformly in the logarithm."""
    return math.exp(rng.uniform(math.log(low), math.log(high)))


def levels(rng: Rng, program: PortProgram, limits: ValueLimits) -> Levels:
    """Draw levels over all of the precision's range, such that no quantity leaves it.

    In a block, which adds its input to its result, both have similar levels.
    """
    scores = _between(rng, _FLAT, limits.scores)
    if program.is_block:
        # A norm's gradient has x**-3, and float32 holds no less than 1e-38. A batch norm divides by
        # its running statistics, not by those of its input.
        batch = ANATOMIES[program.design].norm == "batch"
        low, high = (0.3, 3.0) if batch else (0.1, 1e11)
        x = _between(rng, max(limits.smallest, low), min(limits.largest, high))
        return Levels(x, scores, _between(rng, 0.3, 3), _between(rng, 0.3, 3) * x)
    while True:
        x, v, o = (_between(rng, limits.smallest, limits.largest) for _ in range(3))
        drawn = Levels(x, scores, v, o)
        if all(limits.smallest <= level <= limits.largest for level in drawn.all):
            return drawn


# --- values ---------------------------------------------------------------------------------------


def _offset(rng: Rng, shape: tuple[int, ...], limits: ValueLimits) -> np.ndarray:
    return rng.standard_normal(shape) + rng.choice([-1, 1]) * _between(rng, 0.3, limits.offset)


def _outlier(rng: Rng, shape: tuple[int, ...], limits: ValueLimits) -> np.ndarray:
    """Draw one feature as large as the outlier features of large language models."""
    values = rng.standard_normal(shape)
    values[..., rng.integers(shape[-1])] *= _between(rng, 3, 30)
    return values


VALUES: dict[str, Callable[[Rng, tuple[int, ...], ValueLimits], np.ndarray]] = {
    "normal": lambda rng, shape, limits: rng.standard_normal(shape),
    # Student's t with three degrees of freedom: its variance is finite, its kurtosis is not.
    "heavy-tailed": lambda rng, shape, limits: rng.standard_t(3, shape),
    "offset": _offset,
    "outlier feature": _outlier,
}

# --- masks ----------------------------------------------------------------------------------------


def _causal(rng: Rng, size: Size) -> np.ndarray:
    """Draw a causal mask, aligned at the top left or the bottom right corner."""
    return distance(size) <= rng.choice([0, size.S - size.T])


def _padding(rng: Rng, size: Size) -> np.ndarray:
    lengths = rng.integers(1, size.S, size=(size.B, 1, 1, 1), endpoint=True)
    return np.arange(size.S) < lengths


def _per_head(rng: Rng, size: Size) -> np.ndarray:
    allowed = rng.random((size.B, size.N, size.T, size.S)) < rng.uniform(0.2, 0.9)
    return allowed | _one_key(rng, size)


def _window(rng: Rng, size: Size) -> np.ndarray:
    left, right = rng.integers(0, size.S, size=2)
    return (-left <= distance(size)) & (distance(size) <= right)


def _empty_rows(rng: Rng, size: Size) -> np.ndarray:
    return _per_head(rng, size) & (rng.random((size.B, size.N, size.T, 1)) < 0.7)


def _one_key(rng: Rng, size: Size) -> np.ndarray:
    """Draw a single live key for each query."""
    live = rng.integers(size.S, size=(size.B, size.N, size.T, 1))
    return np.arange(size.S) == live


def _left_padding(rng: Rng, size: Size) -> np.ndarray:
    """Draw a causal mask with padding first: the queries of padding have no key left."""
    begins = rng.integers(0, min(size.T, size.S), size=(size.B, 1, 1, 1))  # the last query has keys
    return (distance(size) <= 0) & (np.arange(size.S) >= begins)


ALLOWED: dict[str, Callable[[Rng, Size], np.ndarray]] = {
    "none": lambda rng, size: np.ones((), bool),
    "causal": _causal,
    "padding": _padding,
    "per head": _per_head,
    "window": _window,
    "empty rows": _empty_rows,
    "left padding": _left_padding,
    "one live key": _one_key,
}

EMPTIED = ("empty rows", "left padding")
"""The masks in which a row may have no key."""


def _token_ids(rng: Rng, size: Size) -> np.ndarray:
    """Draw (B, T) int32: rows of several lengths, with padding before the tokens or after them."""
    tokens = rng.integers(1, TOKENS, size=(size.B, size.T)).astype(np.int32)
    lengths = rng.integers(1, size.T, size=(size.B, 1), endpoint=True)
    place = np.arange(size.T)[:: rng.choice([-1, 1])]
    return np.where(place < lengths, tokens, np.int32(PADDING))


# --- a configuration ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Drawn:
    """The data of a configuration.

    inputs: those of both sides. traits: what was drawn, in words. seed: that of the cotangents.
    parameter: (torch name, shape) -> values, which depend on the order of the calls.
    """

    inputs: dict[str, np.ndarray]
    traits: dict[str, str]
    seed: int
    parameter: Callable[[str, tuple[int, ...]], np.ndarray]


def draw(configuration: Configuration) -> Drawn:
    """Draw the data of a configuration; the same each time."""
    rng, program = configuration.rng(), configuration.drawn_as
    limits, size = LIMITS[configuration.limits], program.size
    level, kind = levels(rng, program, limits), rng.choice(list(VALUES))

    def sequence(length: int) -> np.ndarray:
        values = VALUES[kind](rng, (size.B, length, size.D), limits)
        return values * (level.x / math.sqrt(np.mean(values**2)))

    if not program.is_block:
        lengths = {"query": size.T, "key": size.S, "value": size.S}
        inputs = {name: sequence(length) for name, length in lengths.items()}
    elif ANATOMIES[program.design].tokens:
        inputs, kind = {"x": _token_ids(rng, size)}, "tokens"
    else:
        inputs = {"x": sequence(size.T)}
    masks, mask = _masks(rng, program, level, inputs)
    traits = {
        "values": str(kind),
        "mask": mask,
        "magnitude": f"{level.x:.2g}",
        "scores": f"{level.scores:.2g}",
    }
    seed = int(rng.integers(2**31))

    def parameter(name: str, shape: tuple[int, ...]) -> np.ndarray:
        return _parameter(rng, program, level, name, shape)

    return Drawn(inputs | masks, traits, seed, parameter)


def _masks(
    rng: Rng, program: PortProgram, level: Levels, inputs: dict[str, np.ndarray]
) -> tuple[dict[str, np.ndarray], str]:
    """Draw the mask arrays that go with `inputs`; also return their name."""
    size = program.size
    if program.call != "arrays":
        return MASKS[program.call].inputs(rng, size), program.call
    if program.is_block:
        return _masks_of_block(rng, program, inputs["x"])
    kind = rng.choice(list(ALLOWED))
    full = (size.B, size.N, size.T, size.S)
    allowed = np.broadcast_to(ALLOWED[kind](rng, size), full)
    bias = rng.choice([0.0, 1.0]) * level.scores * rng.standard_normal(full)
    if rng.random() < 0.25:  # the bias may hide keys instead of the mask
        bias, allowed = np.where(allowed, bias, -np.inf), np.ones(full, bool)
    return {"allowed": allowed.copy(), "bias": bias}, str(kind)


def _masks_of_block(
    rng: Rng, program: PortProgram, x: np.ndarray
) -> tuple[dict[str, np.ndarray], str]:
    size, anatomy = replace(program.size, S=program.size.T), ANATOMIES[program.design]
    # float16 and bfloat16 lose a score from which 10,000 is subtracted: if all keys of a row are
    # hidden this way, its probabilities are only rounding.
    lost = anatomy.hide == "+ -1e4" and program.dtype in ("float16", "bfloat16")
    kind = str(rng.choice([k for k in ALLOWED if not (lost and k in EMPTIED)]))
    allowed = ALLOWED[kind](rng, size)
    if anatomy.tokens:
        kind = str(rng.choice(["none", "causal"]))
        allowed = ALLOWED[kind](rng, size) & (x != PADDING)[:, None, None, :]
        kind += ", padding tokens"
    full = (size.B, size.N, size.T, size.S)
    return {"allowed": np.broadcast_to(allowed, full).copy()}, kind


def _parameter(
    rng: Rng, program: PortProgram, level: Levels, name: str, shape: tuple[int, ...]
) -> np.ndarray:
    """Draw values that give queries, keys, values and outputs their levels, biases half of them."""
    *_, owner, part = name.split(".")
    normal = rng.standard_normal(shape)
    x = 1.0 if program.is_block else level.x  # a block's attention reads normalised inputs
    peak = math.sqrt(level.scores)
    if owner.endswith("norm"):
        gain = peak if owner[0] in "qk" else 1.0
        return gain * (0.3 * normal if part == "bias" else 1 + 0.3 * normal)
    if owner == "relative_bias":
        return level.scores * normal
    if owner == "embedding":
        return level.x * normal * (np.arange(shape[0]) != PADDING)[:, None]
    comes, leaves = {
        "q_proj": (x, peak),
        "k_proj": (x, peak),
        "v_proj": (x, level.v),
        "out_proj": (level.v, level.o),
        "up": (1.0, 1.0),
        "gate": (1.0, 1.0),
        "router": (1.0, 1.0),
        "down": (0.6, level.o),
    }[owner]
    if "norm" in program.design and owner in ("q_proj", "k_proj"):
        leaves = 1.0  # the norm that follows gives the level; its epsilon needs inputs near 1
    scale = 0.5 * leaves if part == "bias" else leaves / (comes * math.sqrt(shape[-1]))
    return scale * normal
