"""The steps between Linear, attention and convolution weights and Flax's.

Each is the shapes on both sides, and the way there and back.

Letters: N query heads, or either kind, K key/value heads, G = N // K, H head_dim, D a width.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from jax_attn.transfer.table.step import (
    Arrays,
    Carry,
    HeadSizes,
    MisfitError,
    Shape,
    Shapes,
    Step,
    expect,
)


class _Side(NamedTuple):
    """The shapes that one side of a step may have, and those that they become on the other."""

    expected: str
    fits: Callable[[Shape], bool]
    other: Callable[[Shape], Shape]

    def others(self, step: str, shapes: Shapes, side: str) -> Shapes:
        for shape in shapes:
            expect(step, shape, self.expected, self.fits(shape), side)
        return tuple(map(self.other, shapes))


def _axes(count: int, letters: str, other: Callable[[Shape], Shape]) -> _Side:
    """The side that has so many axes, or more of them where "…" is among the letters."""
    if "…" in letters:
        return _Side(f"at least {count} axes ({letters})", lambda s: len(s) >= count, other)
    return _Side(f"{count} axes ({letters})", lambda s: len(s) == count, other)


def _each(
    name: str, forward: Carry, backward: Carry, flax: _Side, torch: Callable[[int], _Side]
) -> Step:
    """A step that maps array by array; torch: that side for a given head_dim."""

    def source(shapes: Shapes, keys: int) -> Shapes:
        return flax.others(name, shapes, "Flax")

    def target(shapes: Shapes, paths: int, sizes: HeadSizes) -> Shapes:
        return torch(sizes.head_dim).others(name, shapes, "torch")

    return Step(name, source, target, forward, backward)


def _transposed(arrays: Arrays, shapes: Shapes) -> Arrays:
    return tuple(array.T for array in arrays)


def _reshaped(arrays: Arrays, shapes: Shapes) -> Arrays:
    return tuple(array.reshape(shape) for array, shape in zip(arrays, shapes, strict=True))


def _moving(here: tuple[int, int], there: tuple[int, int]) -> Carry:
    return lambda arrays, shapes: tuple(np.moveaxis(array, here, there) for array in arrays)


linear = _each(
    "linear",
    _transposed,
    _transposed,
    _axes(2, "in, out", lambda s: s[::-1]),
    lambda H: _axes(2, "out, in", lambda s: s[::-1]),
)
"""torch.nn.Linear's weight (out, in) <-> kernel (in, out)."""

conv = _each(
    "conv",
    _moving((0, 1), (-1, -2)),
    _moving((-1, -2), (0, 1)),
    _axes(3, "…, in, out", lambda s: (s[-1], s[-2], *s[:-2])),
    lambda H: _axes(3, "out, in, …", lambda s: (*s[2:], s[1], s[0])),
)
"""torch.nn.Conv2d's weight (out, in, height, width) <-> kernel (height, width, in, out); 1d and 3d
likewise."""

heads = _each(
    "heads",
    _reshaped,
    _reshaped,
    _axes(2, "…, N, H", lambda s: (*s[:-2], s[-2] * s[-1])),
    lambda H: _Side(
        f"a last axis of a multiple of head_dim = {H}",
        lambda s: len(s) >= 1 and s[-1] % H == 0,
        lambda s: (*s[:-1], s[-1] // H, H),
    ),
)
"""Last axis into heads: (…, N·H) <-> (…, N, H)."""

heads_in = _each(
    "heads_in",
    _reshaped,
    _reshaped,
    _axes(3, "N, H, …", lambda s: (s[0] * s[1], *s[2:])),
    lambda H: _Side(
        f"a first axis of a multiple of head_dim = {H}",
        lambda s: len(s) >= 2 and s[0] % H == 0,
        lambda s: (s[0] // H, H, *s[1:]),
    ),
)
"""First axis into heads, for the projection that reads them: (N·H, …) <-> (N, H, …)."""

inward = _each(
    "inward",
    _moving((0, 1), (-2, -1)),
    _moving((-2, -1), (0, 1)),
    _axes(2, "…, N, H", lambda s: (*s[-2:], *s[:-2])),
    lambda H: _axes(2, "N, H, …", lambda s: (*s[2:], *s[:2])),
)
"""Heads at the front, as `grouped` leaves them, to the back: (N, H, …) <-> (…, N, H)."""


def _split(arrays: Arrays, shapes: Shapes) -> Arrays:
    (array,) = arrays
    ends = np.cumsum([shape[0] for shape in shapes])[:-1]
    return tuple(np.split(array, ends))


def _concatenated(arrays: Arrays, shapes: Shapes, axis: int = 0) -> Arrays:
    dtypes = {array.dtype.name for array in arrays}
    if len(dtypes) > 1:  # NumPy would promote, and bits would be lost
        raise MisfitError(f"parts of one tensor need one dtype, got {', '.join(sorted(dtypes))}")
    return (np.concatenate(arrays, axis),)


def _packed_source(shapes: Shapes, keys: int) -> Shapes:
    if len({shape[1:] for shape in shapes}) != 1 or not shapes[0]:
        raise MisfitError(
            f"packed expects parts that differ in the first axis only, got {[*shapes]}"
        )
    return ((sum(shape[0] for shape in shapes), *shapes[0][1:]),)


def _packed_target(shapes: Shapes, paths: int, sizes: HeadSizes) -> Shapes:
    """Three parts are a query, a key and a value; any other number of parts are of one size."""
    (shape,), (N, K, H) = shapes, sizes
    if paths == 3:
        rows = [N * H, K * H, K * H]
        expected = f"a first axis of ({N} + 2·{K})·{H}, {sizes}"
    else:
        rows = [shape[0] // paths] * paths if shape else []
        expected = f"a first axis of {paths} equal parts"
    expect("packed", shape, expected, bool(shape) and sum(rows) == shape[0], "torch")
    return tuple((count, *shape[1:]) for count in rows)


packed = Step("packed", _packed_source, _packed_target, _split, _concatenated, "split")
"""One torch tensor <-> several Flax arrays, one after another along the first axis."""


def _joined_source(shapes: Shapes, keys: int) -> Shapes:
    (shape,) = shapes
    if not shape or shape[0] % keys:
        raise MisfitError(f"joined expects a first axis of {keys} equal parts, got {list(shape)}")
    return ((shape[0] // keys, *shape[1:]),) * keys


def _joined_target(shapes: Shapes, paths: int, sizes: HeadSizes) -> Shapes:
    if len(set(shapes)) != 1 or not shapes[0]:
        raise MisfitError(f"joined expects parts of one shape, got {[*shapes]}")
    return ((shapes[0][0] * len(shapes), *shapes[0][1:]),)


joined = Step("joined", _joined_source, _joined_target, _concatenated, _split, "join")
"""Several torch tensors of equal size, one after another along the first axis <-> one array."""


def _dealt(arrays: Arrays, shapes: Shapes) -> Arrays:
    """(K·(G+2)·H, …) -> (K·G, H, …), (K, H, …), (K, H, …)."""
    (array,), (query, key, _) = arrays, shapes
    K, H, *rest = key
    G = query[0] // K
    grouped = array.reshape(K, G + 2, H, *rest)
    return grouped[:, :G].reshape(query), grouped[:, G], grouped[:, G + 1]


def _gathered(arrays: Arrays, shapes: Shapes) -> Arrays:
    query, key, value = arrays
    K, H, *rest = key.shape
    parts = query.reshape(K, -1, H, *rest), key[:, None], value[:, None]
    return (_concatenated(parts, shapes, axis=1)[0].reshape(shapes[0]),)


def _grouped_source(shapes: Shapes, keys: int) -> Shapes:
    query, key, value = shapes if len(shapes) == 3 else ((), (), ())
    if len(key) < 2 or key != value or query[1:] != key[1:] or query[0] % key[0]:
        raise MisfitError(
            f"grouped expects three parts (N, H, …), (K, H, …), (K, H, …), N a multiple of K, "
            f"got {[*shapes]}"
        )
    return (((query[0] + 2 * key[0]) * key[1], *key[2:]),)


def _grouped_target(shapes: Shapes, paths: int, sizes: HeadSizes) -> Shapes:
    (shape,), (N, K, H) = shapes, sizes
    fits = bool(shape) and shape[0] == (N + 2 * K) * H
    expect("grouped", shape, f"a first axis of ({N} + 2·{K})·{H}, {sizes}", fits, "torch")
    return (N, H, *shape[1:]), (K, H, *shape[1:]), (K, H, *shape[1:])


grouped = Step("grouped", _grouped_source, _grouped_target, _dealt, _gathered, "split")
"""One torch tensor, by key/value head its G queries, its key, its value, along the first axis
<-> queries (N, H, …), keys (K, H, …), values (K, H, …). With K = N: query, key and value by turns.
"""
