"""The steps between Linear, attention and convolution weights and Flax's, one after another.

Each is the shapes before it, the shapes behind it, and the way there and back.

Letters: N query heads, or either kind, K key/value heads, G = N // K, H head_dim, D a width.
"""

import numpy as np

from jax_attn.transfer.table.step import Arrays, HeadSizes, MisfitError, Shapes, Step, expect


def _transposed(arrays: Arrays, shapes: Shapes) -> Arrays:
    return tuple(array.T for array in arrays)


def _linear_source(shapes: Shapes, keys: int) -> Shapes:
    for shape in shapes:
        expect("linear", shape, "2 axes (in, out)", len(shape) == 2)
    return tuple(shape[::-1] for shape in shapes)


def _linear_target(shapes: Shapes, paths: int, sizes: HeadSizes) -> Shapes:
    for shape in shapes:
        expect("linear", shape, "2 axes (out, in)", len(shape) == 2, "torch")
    return tuple(shape[::-1] for shape in shapes)


linear = Step("linear", _linear_source, _linear_target, _transposed, _transposed)
"""torch.nn.Linear's weight (out, in) <-> kernel (in, out)."""


def _conv(arrays: Arrays, shapes: Shapes) -> Arrays:
    return tuple(np.moveaxis(array, (0, 1), (-1, -2)) for array in arrays)


def _unconv(arrays: Arrays, shapes: Shapes) -> Arrays:
    return tuple(np.moveaxis(array, (-1, -2), (0, 1)) for array in arrays)


def _conv_source(shapes: Shapes, keys: int) -> Shapes:
    for shape in shapes:
        expect("conv", shape, "at least 3 axes (…, in, out)", len(shape) >= 3)
    return tuple((shape[-1], shape[-2], *shape[:-2]) for shape in shapes)


def _conv_target(shapes: Shapes, paths: int, sizes: HeadSizes) -> Shapes:
    for shape in shapes:
        expect("conv", shape, "at least 3 axes (out, in, …)", len(shape) >= 3, "torch")
    return tuple((*shape[2:], shape[1], shape[0]) for shape in shapes)


conv = Step("conv", _conv_source, _conv_target, _conv, _unconv)
"""torch.nn.Conv2d's weight (out, in, height, width) <-> kernel (height, width, in, out); 1d and 3d
likewise."""


def _reshaped(arrays: Arrays, shapes: Shapes) -> Arrays:
    return tuple(array.reshape(shape) for array, shape in zip(arrays, shapes, strict=True))


def _heads_source(shapes: Shapes, keys: int) -> Shapes:
    for shape in shapes:
        expect("heads", shape, "at least 2 axes (…, N, H)", len(shape) >= 2)
    return tuple((*shape[:-2], shape[-2] * shape[-1]) for shape in shapes)


def _heads_target(shapes: Shapes, paths: int, sizes: HeadSizes) -> Shapes:
    H = sizes.head_dim
    for shape in shapes:
        fits = shape and shape[-1] % H == 0
        expect("heads", shape, f"a last axis of a multiple of head_dim = {H}", fits, "torch")
    return tuple((*shape[:-1], shape[-1] // H, H) for shape in shapes)


heads = Step("heads", _heads_source, _heads_target, _reshaped, _reshaped)
"""Last axis into heads: (…, N·H) <-> (…, N, H)."""


def _heads_in_source(shapes: Shapes, keys: int) -> Shapes:
    for shape in shapes:
        expect("heads_in", shape, "at least 3 axes (N, H, …)", len(shape) >= 3)
    return tuple((shape[0] * shape[1], *shape[2:]) for shape in shapes)


def _heads_in_target(shapes: Shapes, paths: int, sizes: HeadSizes) -> Shapes:
    H = sizes.head_dim
    for shape in shapes:
        fits = len(shape) >= 2 and shape[0] % H == 0
        expect("heads_in", shape, f"a first axis of a multiple of head_dim = {H}", fits, "torch")
    return tuple((shape[0] // H, H, *shape[1:]) for shape in shapes)


heads_in = Step("heads_in", _heads_in_source, _heads_in_target, _reshaped, _reshaped)
"""First axis into heads, for the projection that reads them: (N·H, …) <-> (N, H, …)."""


def _inward(arrays: Arrays, shapes: Shapes) -> Arrays:
    return tuple(np.moveaxis(array, (0, 1), (-2, -1)) for array in arrays)


def _outward(arrays: Arrays, shapes: Shapes) -> Arrays:
    return tuple(np.moveaxis(array, (-2, -1), (0, 1)) for array in arrays)


def _inward_source(shapes: Shapes, keys: int) -> Shapes:
    for shape in shapes:
        expect("inward", shape, "at least 2 axes (…, N, H)", len(shape) >= 2)
    return tuple((*shape[-2:], *shape[:-2]) for shape in shapes)


def _inward_target(shapes: Shapes, paths: int, sizes: HeadSizes) -> Shapes:
    return tuple((*shape[2:], *shape[:2]) for shape in shapes)


inward = Step("inward", _inward_source, _inward_target, _inward, _outward)
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
    """Three parts are a query's, a key's and a value's; of any other number all are alike."""
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
    fits = shape and shape[0] == (N + 2 * K) * H
    expect("grouped", shape, f"a first axis of ({N} + 2·{K})·{H}, {sizes}", fits, "torch")
    return (N, H, *shape[1:]), (K, H, *shape[1:]), (K, H, *shape[1:])


grouped = Step("grouped", _grouped_source, _grouped_target, _dealt, _gathered, "split")
"""One torch tensor, by key/value head its G queries, its key, its value, along the first axis
<-> queries (N, H, …), keys (K, H, …), values (K, H, …). With K = N: query, key and value by turns.
"""
