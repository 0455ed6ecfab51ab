"""View one tensor in the shape of another: with its axes merged, split and permuted."""

from collections.abc import Iterator, Sequence
from itertools import accumulate, combinations, permutations
from math import prod
from operator import mul
from typing import NamedTuple

import numpy as np


class View(NamedTuple):
    """A change of a tensor's shape: merge or split its axes, permute them, merge or split again.

    is_plain: whether axes of the same size keep their order.
    """

    split: tuple[int, ...]
    axes: tuple[int, ...]
    shape: tuple[int, ...]
    is_plain: bool

    def of(self, x: np.ndarray) -> np.ndarray:
        """Return the tensor in the other shape."""
        return x.reshape(self.split).transpose(self.axes).reshape(self.shape)

    def back(self, x: np.ndarray) -> np.ndarray:
        """Undo the view: return the numbers in the original order of axes, flat."""
        permuted = [self.split[axis] for axis in self.axes]
        return x.reshape(permuted).transpose(np.argsort(self.axes)).ravel()


def views(own: Sequence[int], shape: Sequence[int]) -> Iterator[View]:
    """Yield the ways to view a tensor of shape `own` in `shape`.

    Its own axes are permuted or, if those of `shape` are finer, the axes of `shape`. If neither are
    finer, as those of groups of channels, the numbers keep their order.
    """
    own, shape = (tuple(n for n in own if n > 1), tuple(shape))
    wanted = tuple(n for n in shape if n > 1)
    found = False
    for order in permutations(range(len(own))):
        if _cuts(wanted) <= _cuts([own[i] for i in order]):
            found = True
            yield View(own, order, shape, _is_plain(own, order))
    for order in () if found else permutations(range(len(wanted))):
        finer = tuple(wanted[i] for i in order)  # the axes of `wanted` in the order of its own
        if _cuts(own) <= _cuts(finer):
            found, back = True, tuple(map(int, np.argsort(order)))
            yield View(finer, back, shape, _is_plain(wanted, order))
    if not found and prod(own) == prod(shape):
        yield View(own, tuple(range(len(own))), shape, True)


def _is_plain(sizes: Sequence[int], order: Sequence[int]) -> bool:
    return not any(i > j and sizes[i] == sizes[j] for i, j in combinations(order, 2))


def _cuts(shape: Sequence[int]) -> set[int]:
    """Return where axes end, in elements; an array can take a shape if it has all its cuts."""
    return set(accumulate(shape, mul))
