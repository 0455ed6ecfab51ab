"""The invertible steps of a row, in the direction from torch to Flax.

A step holds no sizes; the Flax module has them. `source` maps the shapes after a step to the shapes
before it, so a row's shapes follow from its target's, and `forward` and `backward` convert the
arrays. Without a module, `target` maps the shapes before a step to those after it, using the
`Sizes` that cannot be inferred from torch shapes.

Letters: N query heads, or either kind, K key/value heads, G = N // K, H head_dim, D a width.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

Shape = tuple[int, ...]
Shapes = tuple[Shape, ...]
Arrays = tuple[np.ndarray, ...]
Carry = Callable[[Arrays, Shapes], Arrays]
_Order = Callable[[int, int | None], np.ndarray]


class MisfitError(ValueError):
    """Shapes or dtypes that a step cannot take."""


class Sizes(NamedTuple):
    """N, K and H, which cannot be inferred from the shapes of flat projections."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, repr=False)
class Step:
    """One invertible step on the arrays of a row. Both directions preserve every bit.

    Attributes:
      name: its name in plans and errors.
      source: (shapes after the step, number of torch keys) -> shapes before it; raises MisfitError.
      target: (shapes before the step, number of Flax paths, sizes) -> shapes after it; raises
        MisfitError.
      forward: (arrays, shapes after the step) -> arrays.
      backward: (arrays, shapes before the step) -> arrays.
      fan: "each" maps array by array, "split" turns one torch tensor into several Flax arrays, and
        "join" turns several torch tensors into one Flax array.
    """

    name: str
    source: Callable[[Shapes, int], Shapes]
    target: Callable[[Shapes, int, Sizes], Shapes]
    forward: Carry
    backward: Carry
    fan: Literal["each", "split", "join"] = "each"

    def __repr__(self) -> str:
        return self.name


def _expect(step: str, shape: Shape, expected: str, fits: bool, side: str = "torch") -> None:
    """Raise MisfitError unless the shape fits."""
    if not fits:
        raise MisfitError(f"{step} expects {expected} on the {side} side, got {list(shape)}")


class _Side(NamedTuple):
    """The shapes that one side of a step may have, and how they map to the other side."""

    expected: str
    fits: Callable[[Shape], bool]
    other: Callable[[Shape], Shape]

    def others(self, step: str, shapes: Shapes, side: str) -> Shapes:
        for shape in shapes:
            _expect(step, shape, self.expected, self.fits(shape), side)
        return tuple(map(self.other, shapes))


def _axes(count: int, letters: str, other: Callable[[Shape], Shape]) -> _Side:
    """Return the side with `count` axes, or at least that many if "…" is among the letters."""
    if "…" in letters:
        return _Side(f"at least {count} axes ({letters})", lambda s: len(s) >= count, other)
    return _Side(f"{count} axes ({letters})", lambda s: len(s) == count, other)


def _each(
    name: str, forward: Carry, backward: Carry, flax: _Side, torch: Callable[[int], _Side]
) -> Step:
    """Return a step that maps array by array; torch: that side for a given head_dim."""

    def source(shapes: Shapes, keys: int) -> Shapes:
        return flax.others(name, shapes, "Flax")

    def target(shapes: Shapes, paths: int, sizes: Sizes) -> Shapes:
        return torch(sizes.head_dim).others(name, shapes, "torch")

    return Step(name, source, target, forward, backward)


def _reshaped(arrays: Arrays, shapes: Shapes) -> Arrays:
    return tuple(array.reshape(shape) for array, shape in zip(arrays, shapes, strict=True))


def _moving(here: tuple[int, int], there: tuple[int, int]) -> Carry:
    return lambda arrays, shapes: tuple(np.moveaxis(array, here, there) for array in arrays)


linear = _each(
    "linear",
    _moving((0, 1), (1, 0)),
    _moving((1, 0), (0, 1)),
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
"""torch.nn.Conv2d's weight (out, in, height, width) <-> kernel (height, width, in, out); also 1d
and 3d."""

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
"""Split the last axis into heads: (…, N·H) <-> (…, N, H)."""

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
"""Split the first axis into heads, for the output projection: (N·H, …) <-> (N, H, …)."""

inward = _each(
    "inward",
    _moving((0, 1), (-2, -1)),
    _moving((-2, -1), (0, 1)),
    _axes(2, "…, N, H", lambda s: (*s[-2:], *s[:-2])),
    lambda H: _axes(2, "N, H, …", lambda s: (*s[2:], *s[:2])),
)
"""Move heads from the front, where `grouped` puts them, to the back: (N, H, …) <-> (…, N, H)."""


squeezed = _each(
    "squeezed",
    _reshaped,
    _reshaped,
    _Side("any shape", lambda s: True, lambda s: (1, 1, *s)),
    lambda H: _Side("two first axes of 1", lambda s: s[:2] == (1, 1), lambda s: s[2:]),
)
"""Remove two leading axes of size 1, as in torch's `bias_k`: (1, 1, …) <-> (…)."""


def _split(arrays: Arrays, shapes: Shapes) -> Arrays:
    (array,) = arrays
    ends = np.cumsum([shape[0] for shape in shapes])[:-1]
    return tuple(np.split(array, ends))


def concatenated(arrays: Arrays, shapes: Shapes, axis: int = 0) -> Arrays:
    """Concatenate arrays of one dtype. Raises MisfitError for several."""
    dtypes = {array.dtype.name for array in arrays}
    if len(dtypes) > 1:  # NumPy would promote and lose bits
        raise MisfitError(f"parts of one tensor need one dtype, got {', '.join(sorted(dtypes))}")
    return (np.concatenate(arrays, axis),)


def _packed_source(shapes: Shapes, keys: int) -> Shapes:
    if len({shape[1:] for shape in shapes}) != 1 or not shapes[0]:
        raise MisfitError(
            f"packed expects parts that differ in the first axis only, got {[*shapes]}"
        )
    return ((sum(shape[0] for shape in shapes), *shapes[0][1:]),)


def _packed_target(shapes: Shapes, paths: int, sizes: Sizes) -> Shapes:
    """Return the parts' shapes: three are query, key and value; other numbers have equal sizes."""
    (shape,), (N, K, H) = shapes, sizes
    if paths == 3:
        rows = [N * H, K * H, K * H]
        expected = f"a first axis of ({N} + 2·{K})·{H}, {sizes}"
    else:
        rows = [shape[0] // paths] * paths if shape else []
        expected = f"a first axis of {paths} equal parts"
    _expect("packed", shape, expected, bool(shape) and sum(rows) == shape[0])
    return tuple((count, *shape[1:]) for count in rows)


packed = Step("packed", _packed_source, _packed_target, _split, concatenated, "split")
"""One torch tensor <-> several Flax arrays, which it concatenates along the first axis."""


def _joined_source(shapes: Shapes, keys: int) -> Shapes:
    (shape,) = shapes
    if not shape or shape[0] % keys:
        raise MisfitError(f"joined expects a first axis of {keys} equal parts, got {list(shape)}")
    return ((shape[0] // keys, *shape[1:]),) * keys


def _joined_target(shapes: Shapes, paths: int, sizes: Sizes) -> Shapes:
    if len(set(shapes)) != 1 or not shapes[0]:
        raise MisfitError(f"joined expects parts of one shape, got {[*shapes]}")
    return ((shapes[0][0] * len(shapes), *shapes[0][1:]),)


joined = Step("joined", _joined_source, _joined_target, concatenated, _split, "join")
"""Several torch tensors of equal size <-> one array, their concatenation along the first axis."""


def _dealt(arrays: Arrays, shapes: Shapes) -> Arrays:
    """Split (K·(G+2)·H, …) into (K·G, H, …), (K, H, …), (K, H, …)."""
    (array,), (query, key, _) = arrays, shapes
    K, H, *rest = key
    G = query[0] // K
    grouped = array.reshape(K, G + 2, H, *rest)
    return grouped[:, :G].reshape(query), grouped[:, G], grouped[:, G + 1]


def _gathered(arrays: Arrays, shapes: Shapes) -> Arrays:
    query, key, value = arrays
    K, H, *rest = key.shape
    parts = query.reshape(K, -1, H, *rest), key[:, None], value[:, None]
    return (concatenated(parts, shapes, axis=1)[0].reshape(shapes[0]),)


def _grouped_source(shapes: Shapes, keys: int) -> Shapes:
    query, key, value = shapes if len(shapes) == 3 else ((), (), ())
    if len(key) < 2 or key != value or query[1:] != key[1:] or query[0] % key[0]:
        raise MisfitError(
            f"grouped expects three parts (N, H, …), (K, H, …), (K, H, …), N a multiple of K, "
            f"got {[*shapes]}"
        )
    return (((query[0] + 2 * key[0]) * key[1], *key[2:]),)


def _grouped_target(shapes: Shapes, paths: int, sizes: Sizes) -> Shapes:
    (shape,), (N, K, H) = shapes, sizes
    fits = bool(shape) and shape[0] == (N + 2 * K) * H
    _expect("grouped", shape, f"a first axis of ({N} + 2·{K})·{H}, {sizes}", fits)
    return (N, H, *shape[1:]), (K, H, *shape[1:]), (K, H, *shape[1:])


grouped = Step("grouped", _grouped_source, _grouped_target, _dealt, _gathered, "split")
"""One torch tensor that holds, for each key/value head, its G queries, key and value along the
first axis <-> queries (N, H, …), keys (K, H, …), values (K, H, …). With K = N: query, key and value
alternate.
"""


def in_parts(parts: int) -> Step:
    """Make the step before `packed` for a tensor that is packed part by part.

    Each part holds its share of all three, for example of query, key and value, in sequence:
    CodeGen has four such parts, and concatenated shards of a packed projection are as many as there
    are shards. After the step, each of the three is contiguous.

    Args:
      parts: how many parts there are, along the first axis.

    Raises:
      ValueError: `parts` is not an int ≥ 1.
    """
    if not (isinstance(parts, int) and not isinstance(parts, bool) and parts >= 1):
        raise ValueError(f"in_parts: parts: expected an int ≥ 1, got {parts!r}")

    def swapped(outer: int, inner: int) -> Carry:
        return lambda arrays, shapes: tuple(
            array.reshape(outer, inner, -1, *array.shape[1:]).swapaxes(0, 1).reshape(array.shape)
            for array in arrays
        )

    side = _Side(
        f"a first axis of a multiple of 3·{parts}",
        lambda s: bool(s) and 0 not in s and s[0] % (3 * parts) == 0,
        lambda s: s,
    )
    return _each(f"in_parts({parts})", swapped(parts, 3), swapped(3, parts), side, lambda H: side)


def to_half_split(dim: int | None = None) -> Step:
    """Make the step from rotary pairs (2m, 2m + 1) in torch to pairs (m, m + dim/2) in Flax.

    It acts on the last axis. Place it after `heads` in the rows of q_proj and k_proj, weight and
    bias, and as the only step in the rows of q_norm and k_norm: it converts Meta's weights for a
    module that rotates half-split pairs.

    Args:
      dim: how many features of a head are rotated, from the first on; None for all.

    Raises:
      ValueError: `dim` is not an even int ≥ 2.
    """
    return _reordered("to_half_split", dim, _even_first, lambda w, d: _even_first(w, d).argsort())


def to_interleaved(dim: int | None = None) -> Step:
    """Make the step from rotary pairs (m, m + dim/2) in torch to pairs (2m, 2m + 1) in Flax.

    It is the inverse of `to_half_split`.
    """
    return _reordered("to_interleaved", dim, lambda w, d: _even_first(w, d).argsort(), _even_first)


def _even_first(width: int, dim: int | None) -> np.ndarray:
    """Return the order: even features among the first `dim`, then the odd ones, then the rest."""
    end = width if dim is None else dim
    return np.r_[0:end:2, 1:end:2, end:width]


def _reordered(name: str, dim: int | None, forward: _Order, backward: _Order) -> Step:
    if not (dim is None or (isinstance(dim, int) and dim >= 2 and dim % 2 == 0)):
        raise ValueError(f"{name}: dim: expected an even int ≥ 2, or None, got {dim!r}")
    width = "an even last axis" if dim is None else f"a last axis of at least {dim}"
    side = _Side(
        f"{width} (…, H)",
        lambda s: bool(s) and s[-1] > 0 and (s[-1] % 2 == 0 if dim is None else s[-1] >= dim),
        lambda s: s,
    )

    def taken(order: _Order) -> Carry:
        return lambda arrays, shapes: tuple(
            array.take(order(array.shape[-1], dim), axis=-1) for array in arrays
        )

    torch = _Side("any shape", lambda s: True, lambda s: s)
    name = name if dim is None else f"{name}({dim})"
    return _each(name, taken(forward), taken(backward), side, lambda H: torch)
