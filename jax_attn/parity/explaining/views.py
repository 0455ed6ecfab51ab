"""One tensor seen in the shape of another: its axes merged, split and permuted."""

from collections.abc import Iterator, Sequence
from itertools import accumulate, combinations, permutations
from operator import mul
from typing import NamedTuple

import numpy as np


class View(NamedTuple):
    """How a tensor is seen in another shape: its axes merged or split, permuted, merged or split;
    and whether axes of one size keep their order."""

    split: tuple[int, ...]
    axes: tuple[int, ...]
    shape: tuple[int, ...]
    is_plain: bool

    def of(self, x: np.ndarray) -> np.ndarray:
        """The tensor, seen so."""
        return x.reshape(self.split).transpose(self.axes).reshape(self.shape)

    def back(self, x: np.ndarray) -> np.ndarray:
        """What is seen so, in the order of its own axes, flat."""
        permuted = [self.split[axis] for axis in self.axes]
        return x.reshape(permuted).transpose(np.argsort(self.axes)).ravel()


def views(own: Sequence[int], shape: Sequence[int]) -> Iterator[View]:
    """How a tensor of shape `own` can be seen in `shape`: its axes permuted, or those of `shape`
    where they are finer."""
    own, shape = (tuple(n for n in own if n > 1), tuple(shape))
    wanted = tuple(n for n in shape if n > 1)
    coarser = False
    for order in permutations(range(len(own))):
        if _cuts(wanted) <= _cuts([own[i] for i in order]):
            coarser = True
            yield View(own, order, shape, _is_plain(own, order))
    for order in () if coarser else permutations(range(len(wanted))):
        finer = tuple(wanted[i] for i in order)  # the axes of `wanted` in the order of its own
        if _cuts(own) <= _cuts(finer):
            back = tuple(map(int, np.argsort(order)))
            yield View(finer, back, shape, _is_plain(wanted, order))


def _is_plain(sizes: Sequence[int], order: Sequence[int]) -> bool:
    return not any(i > j and sizes[i] == sizes[j] for i, j in combinations(order, 2))


def _cuts(shape: Sequence[int]) -> set[int]:
    """Where axes end, in elements: an array can be seen in a shape whose cuts it has."""
    return set(accumulate(shape, mul))
