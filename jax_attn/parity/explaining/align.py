"""Find which tensors of two runs are the same, only by their numbers.

Two tensors are the same if one equals the other, within rounding, after its axes are merged, split
and permuted. Names are not used. Sorted numbers are compared first, which is fast: no order of the
numbers brings two tensors closer to each other than sorting both.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jax_attn.parity.bugs.views import View, views
from jax_attn.parity.explaining.taps.tap import Tap

_FLOAT32, _TINY = 2.0**-24, 2.0**-126
_SMALLER = 0.1
_SAMPLED = 64
"""The number of sorted numbers of a tensor by which most of the others are told from it."""
APART = 8
"""Limit of the RMS distance of two equal tensors, in units of what rounding moves the reference's.
Correct ports lie at one to three units, in whatever order they add up; a scale that is 1% off lies
at about 10,000."""


class Aligner:
    """An index of the reference's tensors by their numbers."""

    def __init__(
        self, taps: Sequence[Tap], spreads: Sequence[np.ndarray], outputs: Mapping[str, np.ndarray]
    ):
        """Index the taps.

        spreads: how far rounding moves each number of each tap (RMS). outputs: the run's outputs.
        """
        self.taps = taps
        self._scales = [
            _scale(tap.numbers, spread) for tap, spread in zip(taps, spreads, strict=True)
        ]
        read = {(p, tap.place.is_backward) for tap in taps for p in tap.parents}
        self._last = {t.index for t in taps if (t.index, t.place.is_backward) not in read}
        self._outputs = {
            f"output {name}": {t.index for t in taps if np.array_equal(t.value.ravel(), a.ravel())}
            for name, a in outputs.items()
        }
        self._readers: dict[int, list[int]] = defaultdict(list)
        for tap in taps:
            for parent in tap.parents:
                self._readers[parent].append(tap.index)
        self._by_size: dict[int, _OfSize] = {}

    def of_line(self, index: int) -> list[int]:
        """Return the taps of the same operation, shape and line as a tap, in any layer or step."""
        tap = self.taps[index]
        key = tap.op, tap.shape, tap.place.source, tap.place.is_backward
        if not tap.place.source:
            return [index]
        return [
            t.index
            for t in self.taps
            if (t.op, t.shape, t.place.source, t.place.is_backward) == key
        ]

    def following(self, of: Collection[int]) -> set[int]:
        """Return the indices of `of` and of all taps that are computed from them."""
        found: set[int] = set()
        left = list(of)
        while left:
            index = left.pop()
            if index not in found:
                found.add(index)
                left += self._readers[index]
        return found

    def _of_size(self, size: int) -> "_OfSize":
        if size not in self._by_size:
            self._by_size[size] = _OfSize(
                [
                    _Sorted(tap, tap.numbers.ravel()[order], scale.ravel()[order])
                    for tap, scale in zip(self.taps, self._scales, strict=True)
                    if tap.value.size == size and tap.tells
                    for order in [np.argsort(tap.numbers, axis=None)]
                ]
            )
        return self._by_size[size]

    def results(self, name: str) -> set[int]:
        """Return the taps that an output may be; for a gradient, all last taps of either pass."""
        return self._outputs.get(name) or self._last

    def partners(self, tap: Tap) -> list[int]:
        """Return the indices of the reference's taps that are the same tensor as `tap`."""
        if not tap.tells:
            return []
        values = np.sort(tap.numbers, axis=None)
        return [
            theirs.index
            for theirs, ordered, scale in self._of_size(tap.value.size).near(values)
            if apart(values, ordered, scale) <= APART and self.is_near(theirs.index, tap.numbers)
        ]

    def is_near(self, theirs: int, numbers: np.ndarray) -> bool:
        """Return whether some order of a tap's axes gives numbers, within rounding."""
        if self.taps[theirs].value.size != numbers.size:
            return False
        return any(order.distance <= APART for order in self.orders(theirs, numbers))

    def orders(
        self, theirs: int, like: np.ndarray, numbers: np.ndarray | None = None
    ) -> "Iterator[Order]":
        """Yield a tap of the reference in the shape of `like`, for each possible order of its axes.

        numbers: numbers in place of the tap's own, which are assumed to round in proportion.
        """
        own, scale = self.taps[theirs].numbers, self._scales[theirs]
        if numbers is not None:
            own_rounding = _rms(scale) / max(_rms(own), _TINY)
            scale = np.hypot(scale, own_rounding * np.nan_to_num(numbers, posinf=0, neginf=0))
        own = own if numbers is None else numbers.reshape(own.shape)
        for view in views(own.shape, like.shape):
            seen, rounding = view.of(own), view.of(scale)
            yield Order(apart(like, seen, rounding), seen, rounding, view)


class Order(NamedTuple):
    """A tensor of the reference with its axes in another order.

    distance: RMS distance from the port's tensor, in units of rounding. numbers, scale: its
    numbers, and the rounding of each. view: the change of its axes.
    """

    distance: float
    numbers: np.ndarray
    scale: np.ndarray
    view: View

    @property
    def is_plain(self) -> bool:
        """True if axes of the same size, such as queries and keys, keep their order."""
        return self.view.is_plain


class _Sorted(NamedTuple):
    tap: Tap
    values: np.ndarray
    scale: np.ndarray


class _OfSize:
    """The tensors of one size, compared at once by some of their sorted numbers."""

    def __init__(self, tensors: Sequence[_Sorted]):
        self._tensors = tensors
        size = tensors[0].values.size if tensors else 1
        self._at = np.unique(np.linspace(0, size - 1, min(size, _SAMPLED)).astype(int))
        shape = (len(tensors), len(self._at))
        self._values = np.reshape([x.values[self._at] for x in tensors], shape)
        self._scales = np.reshape([x.scale[self._at] for x in tensors], shape)

    def near(self, values: np.ndarray) -> list[_Sorted]:
        """Return the tensors that may be near some sorted numbers, and all that are."""
        sample = values[self._at]
        with np.errstate(invalid="ignore"):
            off = np.where(sample == self._values, 0.0, sample - self._values) / self._scales
        far = np.square(off).sum(1) > APART**2 * values.size
        return [x for x, is_far in zip(self._tensors, far, strict=True) if not is_far]


def _rms(numbers: np.ndarray) -> float:
    finite = numbers[np.isfinite(numbers)]
    return float(np.sqrt(np.mean(np.square(finite)))) if finite.size else 0.0


def _scale(numbers: np.ndarray, spread: np.ndarray) -> np.ndarray:
    """Return the unit of each number's deviation.

    A few runs estimate the spread of one number badly, so it is averaged with a typical spread of
    the tensor: a low quantile, because a mask's fills, whose spread is large, may be most of it.
    """
    spread = np.where(np.isfinite(numbers), spread, 0.0)
    typical = np.quantile(spread, _SMALLER) if spread.size else 0.0
    size = np.where(np.isfinite(numbers), np.abs(numbers), 0.0)
    return np.sqrt((np.square(spread) + typical**2) / 2) + _FLOAT32 * size + _TINY


def apart(a: np.ndarray, b: np.ndarray, scale: np.ndarray) -> float:
    """Return the RMS distance in units of `scale`; infinite if only one has a fill somewhere."""
    if not a.size:
        return 0.0
    with np.errstate(invalid="ignore"):
        alike = (a == b) | (np.isnan(a) & np.isnan(b))
        distance = np.where(alike, 0.0, a - b) / scale
        return math.sqrt(np.mean(np.square(distance)))


def difference(a: np.ndarray, b: np.ndarray) -> float:
    """Return how different two arrays are, from 0 to 2; a fill weighs no more than a number."""
    return float(np.mean(np.nan_to_num(np.abs(np.tanh(a) - np.tanh(b)), nan=2.0)))
