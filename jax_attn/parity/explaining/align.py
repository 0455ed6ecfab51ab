"""Which tensors of two runs are the same, known by their numbers alone.

Two tensors are the same where one is the other after its axes are merged, split and permuted, and
each number lies within rounding. No name is asked for. Sorted numbers tell apart quickly: two
tensors are no further from each other in any order than when both are sorted.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jax_attn.parity.explaining.taps.tap import Tap
from jax_attn.parity.explaining.views import View, views

_FLOAT32, _TINY = 2.0**-24, 2.0**-126
_SMALLER = 0.1
APART = 8
"""How many times what rounding moves a tensor by (RMS) another may lie from it: correct ports err
by one to three times that, by whatever order they add up in; a scale 1% off by some 10,000."""


class Aligner:
    """The reference's tensors, by their numbers."""

    def __init__(
        self, taps: Sequence[Tap], spreads: Sequence[np.ndarray], outputs: Mapping[str, np.ndarray]
    ):
        """spreads: by how much rounding moves each number of each tap (RMS). outputs: the run's."""
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
        self._by_size: dict[int, list[_Sorted]] = {}

    def _of_size(self, size: int) -> "list[_Sorted]":
        if size not in self._by_size:
            self._by_size[size] = [
                _Sorted(tap, tap.numbers.ravel()[order], scale.ravel()[order])
                for tap, scale in zip(self.taps, self._scales, strict=True)
                if tap.value.size == size and tap.tells
                for order in [np.argsort(tap.numbers, axis=None)]
            ]
        return self._by_size[size]

    def results(self, name: str) -> set[int]:
        """What an output is, or may be: of a gradient, all that no other tap of its pass reads."""
        return self._outputs.get(name) or self._last

    def partners(self, tap: Tap) -> list[int]:
        """The reference's taps that are `tap`."""
        if not tap.tells:
            return []
        values = np.sort(tap.numbers, axis=None)
        return [
            theirs.index
            for theirs, ordered, scale in self._of_size(tap.value.size)
            if apart(values, ordered, scale) <= APART
            and any(order.distance <= APART for order in self.orders(theirs.index, tap.numbers))
        ]

    def orders(
        self, theirs: int, like: np.ndarray, numbers: np.ndarray | None = None
    ) -> "Iterator[Order]":
        """A tap of the reference in the shape of `like`, once for each order of its axes that gives
        it.

        numbers: others in its place, which round in the proportion in which its own do.
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
    """A tensor of the reference with its axes in another order: how far it lies from one of the
    port, in roundings; its numbers, and the rounding of each; how it is seen."""

    distance: float
    numbers: np.ndarray
    scale: np.ndarray
    view: View

    @property
    def is_plain(self) -> bool:
        """Whether no axes of one size, as queries and keys, are exchanged."""
        return self.view.is_plain


class _Sorted(NamedTuple):
    tap: Tap
    values: np.ndarray
    scale: np.ndarray


def _rms(numbers: np.ndarray) -> float:
    finite = numbers[np.isfinite(numbers)]
    return float(np.sqrt(np.mean(np.square(finite)))) if finite.size else 0.0


def _scale(numbers: np.ndarray, spread: np.ndarray) -> np.ndarray:
    """What each number's deviation is measured by. Few runs estimate its own spread badly, so that
    of the tensor's smaller ones counts as much: a mask's fills, whose spread is large, may be most
    of a tensor."""
    spread = np.where(np.isfinite(numbers), spread, 0.0)
    typical = np.quantile(spread, _SMALLER) if spread.size else 0.0
    size = np.where(np.isfinite(numbers), np.abs(numbers), 0.0)
    return np.sqrt((np.square(spread) + typical**2) / 2) + _FLOAT32 * size + _TINY


def apart(a: np.ndarray, b: np.ndarray, scale: np.ndarray) -> float:
    """The RMS distance in units of `scale`; infinite where one has a fill and the other not."""
    if not a.size:
        return 0.0
    with np.errstate(invalid="ignore"):
        alike = (a == b) | (np.isnan(a) & np.isnan(b))
        distance = np.where(alike, 0.0, a - b) / scale
        return math.sqrt(np.mean(np.square(distance)))


def difference(a: np.ndarray, b: np.ndarray) -> float:
    """How unlike two arrays are, from 0 to 2; a mask's fill counts no more than another number."""
    return float(np.mean(np.nan_to_num(np.abs(np.tanh(a) - np.tanh(b)), nan=2.0)))
