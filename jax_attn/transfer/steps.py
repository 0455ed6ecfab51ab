"""Invertible steps, read from torch to Flax.

A step never holds a size. The Flax module has the sizes: `source` turns the shapes behind a
step into the shapes before it, so that a row's shapes follow from its target's, and `forward`
and `backward` merely go from the one to the other. Where there is no module, `target` turns the
shapes before a step into those behind it, by the `Sizes` that no torch shape tells.

Letters: N query heads, or either kind, K key/value heads, G = N // K, H head_dim, D a width.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

Shape = tuple[int, ...]
Shapes = tuple[Shape, ...]
Arrays = tuple[np.ndarray, ...]


class MisfitError(ValueError):
    """Shapes or dtypes that a step cannot take."""


class Sizes(NamedTuple):
    """N, K and H: what the shapes of flat projections do not tell."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, repr=False)
class Step:
    """One invertible step on the arrays of a row.

    source(shapes behind, number of torch keys) -> shapes before; raises MisfitError.
    target(shapes before, number of Flax paths, sizes) -> shapes behind; raises MisfitError.
    forward(arrays, shapes behind) and backward(arrays, shapes before) -> arrays, bit for bit.
    fan: "each" maps array by array, "split" turns one torch tensor into several Flax arrays,
        "join" several torch tensors into one Flax array.
    """

    name: str
    source: Callable[[Shapes, int], Shapes]
    target: Callable[[Shapes, int, Sizes], Shapes]
    forward: Callable[[Arrays, Shapes], Arrays]
    backward: Callable[[Arrays, Shapes], Arrays]
    fan: Literal["each", "split", "join"] = "each"

    def __repr__(self) -> str:
        return self.name


def _rank(step: str, shape: Shape, expected: str, fits: bool, side: str = "Flax") -> None:
    if not fits:
        raise MisfitError(f"{step} expects {expected} on the {side} side, got {list(shape)}")


def _transposed(arrays: Arrays, shapes: Shapes) -> Arrays:
    return tuple(array.T for array in arrays)


def _reshaped(arrays: Arrays, shapes: Shapes) -> Arrays:
    return tuple(array.reshape(shape) for array, shape in zip(arrays, shapes, strict=True))


def _split(arrays: Arrays, shapes: Shapes) -> Arrays:
    (array,) = arrays
    ends = np.cumsum([shape[0] for shape in shapes])[:-1]
    return tuple(np.split(array, ends))


def _concatenated(arrays: Arrays, shapes: Shapes, axis: int = 0) -> Arrays:
    dtypes = {array.dtype.name for array in arrays}
    if len(dtypes) > 1:  # NumPy would promote, and bits would be lost
        raise MisfitError(f"parts of one tensor need one dtype, got {', '.join(sorted(dtypes))}")
    return (np.concatenate(arrays, axis),)


def _inward(arrays: Arrays, shapes: Shapes) -> Arrays:
    return tuple(np.moveaxis(array, (0, 1), (-2, -1)) for array in arrays)


def _outward(arrays: Arrays, shapes: Shapes) -> Arrays:
    return tuple(np.moveaxis(array, (-2, -1), (0, 1)) for array in arrays)


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


def _turned_target(shapes: Shapes, paths: int, sizes: Sizes) -> Shapes:
    return shapes


def _linear_source(shapes: Shapes, keys: int) -> Shapes:
    for shape in shapes:
        _rank("linear", shape, "2 axes (in, out)", len(shape) == 2)
    return tuple(shape[::-1] for shape in shapes)


def _linear_target(shapes: Shapes, paths: int, sizes: Sizes) -> Shapes:
    for shape in shapes:
        _rank("linear", shape, "2 axes (out, in)", len(shape) == 2, "torch")
    return tuple(shape[::-1] for shape in shapes)


def _conv(arrays: Arrays, shapes: Shapes) -> Arrays:
    return tuple(np.moveaxis(array, (0, 1), (-1, -2)) for array in arrays)


def _unconv(arrays: Arrays, shapes: Shapes) -> Arrays:
    return tuple(np.moveaxis(array, (-1, -2), (0, 1)) for array in arrays)


def _conv_source(shapes: Shapes, keys: int) -> Shapes:
    for shape in shapes:
        _rank("conv", shape, "at least 3 axes (…, in, out)", len(shape) >= 3)
    return tuple((shape[-1], shape[-2], *shape[:-2]) for shape in shapes)


def _conv_target(shapes: Shapes, paths: int, sizes: Sizes) -> Shapes:
    for shape in shapes:
        _rank("conv", shape, "at least 3 axes (out, in, …)", len(shape) >= 3, "torch")
    return tuple((*shape[2:], shape[1], shape[0]) for shape in shapes)


def _heads_source(shapes: Shapes, keys: int) -> Shapes:
    for shape in shapes:
        _rank("heads", shape, "at least 2 axes (…, N, H)", len(shape) >= 2)
    return tuple((*shape[:-2], shape[-2] * shape[-1]) for shape in shapes)


def _heads_target(shapes: Shapes, paths: int, sizes: Sizes) -> Shapes:
    H = sizes.head_dim
    for shape in shapes:
        fits = shape and shape[-1] % H == 0
        _rank("heads", shape, f"a last axis of a multiple of head_dim = {H}", fits, "torch")
    return tuple((*shape[:-1], shape[-1] // H, H) for shape in shapes)


def _heads_in_source(shapes: Shapes, keys: int) -> Shapes:
    for shape in shapes:
        _rank("heads_in", shape, "at least 3 axes (N, H, …)", len(shape) >= 3)
    return tuple((shape[0] * shape[1], *shape[2:]) for shape in shapes)


def _heads_in_target(shapes: Shapes, paths: int, sizes: Sizes) -> Shapes:
    H = sizes.head_dim
    for shape in shapes:
        fits = len(shape) >= 2 and shape[0] % H == 0
        _rank("heads_in", shape, f"a first axis of a multiple of head_dim = {H}", fits, "torch")
    return tuple((shape[0] // H, H, *shape[1:]) for shape in shapes)


def _inward_source(shapes: Shapes, keys: int) -> Shapes:
    for shape in shapes:
        _rank("inward", shape, "at least 2 axes (…, N, H)", len(shape) >= 2)
    return tuple((*shape[-2:], *shape[:-2]) for shape in shapes)


def _inward_target(shapes: Shapes, paths: int, sizes: Sizes) -> Shapes:
    return tuple((*shape[2:], *shape[:2]) for shape in shapes)


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
    fits = shape and shape[0] == (N + 2 * K) * H
    _rank("grouped", shape, f"a first axis of ({N} + 2·{K})·{H}, {sizes}", fits, "torch")
    return (N, H, *shape[1:]), (K, H, *shape[1:]), (K, H, *shape[1:])


def _packed_source(shapes: Shapes, keys: int) -> Shapes:
    if len({shape[1:] for shape in shapes}) != 1 or not shapes[0]:
        raise MisfitError(
            f"packed expects parts that differ in the first axis only, got {[*shapes]}"
        )
    return ((sum(shape[0] for shape in shapes), *shapes[0][1:]),)


def _packed_target(shapes: Shapes, paths: int, sizes: Sizes) -> Shapes:
    """Three parts are a query's, a key's and a value's; of any other number all are alike."""
    (shape,), (N, K, H) = shapes, sizes
    if paths == 3:
        rows = [N * H, K * H, K * H]
        expected = f"a first axis of ({N} + 2·{K})·{H}, {sizes}"
    else:
        rows = [shape[0] // paths] * paths if shape else []
        expected = f"a first axis of {paths} equal parts"
    _rank("packed", shape, expected, bool(shape) and sum(rows) == shape[0], "torch")
    return tuple((count, *shape[1:]) for count in rows)


def _joined_source(shapes: Shapes, keys: int) -> Shapes:
    (shape,) = shapes
    if not shape or shape[0] % keys:
        raise MisfitError(f"joined expects a first axis of {keys} equal parts, got {list(shape)}")
    return ((shape[0] // keys, *shape[1:]),) * keys


def _joined_target(shapes: Shapes, paths: int, sizes: Sizes) -> Shapes:
    if len(set(shapes)) != 1 or not shapes[0]:
        raise MisfitError(f"joined expects parts of one shape, got {[*shapes]}")
    return ((shapes[0][0] * len(shapes), *shapes[0][1:]),)


linear = Step("linear", _linear_source, _linear_target, _transposed, _transposed)
"""torch.nn.Linear's weight (out, in) <-> kernel (in, out)."""

conv = Step("conv", _conv_source, _conv_target, _conv, _unconv)
"""torch.nn.Conv2d's weight (out, in, height, width) <-> kernel (height, width, in, out); 1d and 3d
likewise."""

heads = Step("heads", _heads_source, _heads_target, _reshaped, _reshaped)
"""Last axis into heads: (…, N·H) <-> (…, N, H)."""

heads_in = Step("heads_in", _heads_in_source, _heads_in_target, _reshaped, _reshaped)
"""First axis into heads, for the projection that reads them: (N·H, …) <-> (N, H, …)."""

packed = Step("packed", _packed_source, _packed_target, _split, _concatenated, "split")
"""One torch tensor <-> several Flax arrays, one after another along the first axis."""

grouped = Step("grouped", _grouped_source, _grouped_target, _dealt, _gathered, "split")
"""One torch tensor, by key/value head its G queries, its key, its value, along the first axis
<-> queries (N, H, …), keys (K, H, …), values (K, H, …). With K = N: query, key and value by turns.
"""

inward = Step("inward", _inward_source, _inward_target, _inward, _outward)
"""Heads at the front, as `grouped` leaves them, to the back: (N, H, …) <-> (…, N, H)."""

joined = Step("joined", _joined_source, _joined_target, _concatenated, _split, "join")
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
    return Step(name, _turned_source(name, dim), _turned_target, forward, backward)
