"""Invertible steps, read from torch to Flax.

A step never holds a size. The Flax module has the sizes: `source` turns the shapes behind a
step into the shapes before it, so that a row's shapes follow from its target's, and `forward`
and `backward` merely go from the one to the other.

Letters: N query or key/value heads, H head_dim, D a width.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

Shape = tuple[int, ...]
Shapes = tuple[Shape, ...]
Arrays = tuple[np.ndarray, ...]


class MisfitError(ValueError):
    """Shapes or dtypes that a step cannot take."""


@dataclass(frozen=True, repr=False)
class Step:
    """One invertible step on the arrays of a row.

    source(shapes behind, number of torch keys) -> shapes before; raises MisfitError.
    forward(arrays, shapes behind) and backward(arrays, shapes before) -> arrays, bit for bit.
    fan: "each" maps array by array, "split" turns one torch tensor into several Flax arrays,
        "join" several torch tensors into one Flax array.
    """

    name: str
    source: Callable[[Shapes, int], Shapes]
    forward: Callable[[Arrays, Shapes], Arrays]
    backward: Callable[[Arrays, Shapes], Arrays]
    fan: Literal["each", "split", "join"] = "each"

    def __repr__(self) -> str:
        return self.name


def _rank(step: str, shape: Shape, expected: str, fits: bool) -> None:
    if not fits:
        raise MisfitError(f"{step} expects {expected} on the Flax side, got {list(shape)}")


def _transposed(arrays: Arrays, shapes: Shapes) -> Arrays:
    return tuple(array.T for array in arrays)


def _reshaped(arrays: Arrays, shapes: Shapes) -> Arrays:
    return tuple(array.reshape(shape) for array, shape in zip(arrays, shapes, strict=True))


def _split(arrays: Arrays, shapes: Shapes) -> Arrays:
    (array,) = arrays
    ends = np.cumsum([shape[0] for shape in shapes])[:-1]
    return tuple(np.split(array, ends))


def _concatenated(arrays: Arrays, shapes: Shapes) -> Arrays:
    dtypes = {array.dtype.name for array in arrays}
    if len(dtypes) > 1:  # NumPy would promote, and bits would be lost
        raise MisfitError(f"parts of one tensor need one dtype, got {', '.join(sorted(dtypes))}")
    return (np.concatenate(arrays),)


def _halves(dim: int | None) -> Callable[[Arrays, Shapes], Arrays]:
    """Of the first dim of each last axis, those at even places, then those at odd ones."""

    def apply(arrays: Arrays, shapes: Shapes) -> Arrays:
        ends = [array.shape[-1] if dim is None else dim for array in arrays]
        return tuple(
            np.concatenate([a[..., :end:2], a[..., 1:end:2], a[..., end:]], axis=-1)
            for a, end in zip(arrays, ends, strict=True)
        )

    return apply


def _interlaced(dim: int | None) -> Callable[[Arrays, Shapes], Arrays]:
    """The inverse: of the first dim, those of both halves by turns."""

    def apply(arrays: Arrays, shapes: Shapes) -> Arrays:
        made = tuple(array.copy() for array in arrays)
        for array, out in zip(arrays, made, strict=True):
            end = array.shape[-1] if dim is None else dim
            out[..., :end:2], out[..., 1:end:2] = array[..., : end // 2], array[..., end // 2 : end]
        return made

    return apply


def _turned_source(name: str, dim: int | None) -> Callable[[Shapes, int], Shapes]:
    def source(shapes: Shapes, keys: int) -> Shapes:
        for shape in shapes:
            width = shape[-1] if shape else 0
            wanted = "an even last axis" if dim is None else f"a last axis of at least {dim}"
            fits = width and (width % 2 == 0 if dim is None else width >= dim)
            _rank(name, shape, f"{wanted} (…, H)", fits)
        return shapes

    return source


def _linear_source(shapes: Shapes, keys: int) -> Shapes:
    for shape in shapes:
        _rank("linear", shape, "2 axes (in, out)", len(shape) == 2)
    return tuple(shape[::-1] for shape in shapes)


def _heads_source(shapes: Shapes, keys: int) -> Shapes:
    for shape in shapes:
        _rank("heads", shape, "at least 2 axes (…, N, H)", len(shape) >= 2)
    return tuple((*shape[:-2], shape[-2] * shape[-1]) for shape in shapes)


def _heads_in_source(shapes: Shapes, keys: int) -> Shapes:
    for shape in shapes:
        _rank("heads_in", shape, "at least 3 axes (N, H, …)", len(shape) >= 3)
    return tuple((shape[0] * shape[1], *shape[2:]) for shape in shapes)


def _packed_source(shapes: Shapes, keys: int) -> Shapes:
    if len({shape[1:] for shape in shapes}) != 1 or not shapes[0]:
        raise MisfitError(
            f"packed expects parts that differ in the first axis only, got {[*shapes]}"
        )
    return ((sum(shape[0] for shape in shapes), *shapes[0][1:]),)


def _joined_source(shapes: Shapes, keys: int) -> Shapes:
    (shape,) = shapes
    if not shape or shape[0] % keys:
        raise MisfitError(f"joined expects a first axis of {keys} equal parts, got {list(shape)}")
    return ((shape[0] // keys, *shape[1:]),) * keys


linear = Step("linear", _linear_source, _transposed, _transposed)
"""torch.nn.Linear's weight (out, in) <-> kernel (in, out)."""

heads = Step("heads", _heads_source, _reshaped, _reshaped)
"""Last axis into heads: (…, N·H) <-> (…, N, H)."""

heads_in = Step("heads_in", _heads_in_source, _reshaped, _reshaped)
"""First axis into heads, for the projection that reads them: (N·H, …) <-> (N, H, …)."""

packed = Step("packed", _packed_source, _split, _concatenated, "split")
"""One torch tensor <-> several Flax arrays, one after another along the first axis."""

joined = Step("joined", _joined_source, _concatenated, _split, "join")
"""Several torch tensors of equal size, one after another along the first axis <-> one array."""


def to_half_split(dim: int | None = None) -> Step:
    """Rotary pairs (2m, 2m + 1) in torch <-> pairs (m, m + dim/2) in Flax, along the last axis.

    Behind `heads` in the rows of q_proj and k_proj, weight and bias, and alone in those of q_norm
    and k_norm: Meta's weights for a module that turns half-split pairs. dim: how many features
    of a head turn, from the first on; all when None. Raises ValueError for another than an even
    int ≥ 2.
    """
    return _repaired("to_half_split", dim, _halves(dim), _interlaced(dim))


def to_interleaved(dim: int | None = None) -> Step:
    """Rotary pairs (m, m + dim/2) in torch <-> pairs (2m, 2m + 1) in Flax: the other direction."""
    return _repaired("to_interleaved", dim, _interlaced(dim), _halves(dim))


def _repaired(name: str, dim: int | None, forward, backward) -> Step:
    if not (dim is None or (isinstance(dim, int) and dim >= 2 and dim % 2 == 0)):
        raise ValueError(f"{name}: dim: expected an even int ≥ 2, or None, got {dim!r}")
    name = name if dim is None else f"{name}({dim})"
    return Step(name, _turned_source(name, dim), forward, backward)
