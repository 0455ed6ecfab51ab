"""The steps of stacks of matrices: experts, and layers that are scanned."""

from functools import partial

import numpy as np

from jax_attn.transfer.table.steps import (
    Arrays,
    MisfitError,
    Shape,
    Shapes,
    Sizes,
    Step,
    concatenated,
)


def _swapped(arrays: Arrays, shapes: Shapes) -> Arrays:
    return tuple(np.swapaxes(array, -1, -2) for array in arrays)


def _swapped_shapes(side: str, shapes: Shapes) -> Shapes:
    def swapped(shape: Shape) -> Shape:
        if len(shape) < 3:
            axes = "at least 3 axes, the last two of a matrix"
            raise MisfitError(f"linears expects {axes}, on the {side} side, got {list(shape)}")
        return *shape[:-2], shape[-1], shape[-2]

    return tuple(map(swapped, shapes))


linears = Step(
    "linears",
    lambda shapes, keys: _swapped_shapes("Flax", shapes),
    lambda shapes, paths, sizes: _swapped_shapes("torch", shapes),
    _swapped,
    _swapped,
)
"""A stack of `linear`, such as the experts of a layer: (E, out, in) <-> (E, in, out)."""


def _stacked(arrays: Arrays, shapes: Shapes) -> Arrays:
    if len(dtypes := {array.dtype.name for array in arrays}) > 1:  # NumPy would promote
        raise MisfitError(f"stacked expects one dtype, got {', '.join(sorted(dtypes))}")
    return (np.stack(arrays),)


def _taken_apart(arrays: Arrays, shapes: Shapes) -> Arrays:
    return tuple(arrays[0])


def _stacked_source(shapes: Shapes, keys: int) -> Shapes:
    (shape,) = shapes
    if not shape or shape[0] != keys:
        raise MisfitError(f"stacked expects a first axis of {keys}, one a key, got {list(shape)}")
    return (shape[1:],) * keys


def _stacked_target(shapes: Shapes, paths: int, sizes: Sizes) -> Shapes:
    if len(set(shapes)) != 1:
        raise MisfitError(f"stacked expects tensors of one shape, got {[*shapes]}")
    return ((len(shapes), *shapes[0]),)


stacked = Step("stacked", _stacked_source, _stacked_target, _stacked, _taken_apart, "join")
"""Several torch tensors of one shape <-> one array, with an axis of them in front.

With `linears` after it, torch's weights (out, in) of E layers <-> one kernel (E, in, out)."""


def _parted(arrays: Arrays, shapes: Shapes) -> Arrays:
    ends = np.cumsum([shape[1] for shape in shapes])[:-1]
    return tuple(np.split(arrays[0], ends, axis=1))


def _parts_source(shapes: Shapes, keys: int) -> Shapes:
    if len({(shape[:1], shape[2:]) for shape in shapes}) != 1 or len(shapes[0]) < 2:
        expected = "parts that differ in the second axis only"
        raise MisfitError(f"packed_stack expects {expected}, got {[*shapes]}")
    return ((shapes[0][0], sum(shape[1] for shape in shapes), *shapes[0][2:]),)


def _parts_target(shapes: Shapes, paths: int, sizes: Sizes) -> Shapes:
    (shape,) = shapes
    if len(shape) < 2 or shape[1] % paths:
        expected = f"a second axis of {paths} equal parts"
        raise MisfitError(f"packed_stack expects {expected}, got {[*shape]}")
    return ((shape[0], shape[1] // paths, *shape[2:]),) * paths


packed_stack = Step(
    "packed_stack",
    _parts_source,
    _parts_target,
    _parted,
    partial(concatenated, axis=1),
    "split",
)
"""One stack of tensors <-> several, which it concatenates: (E, 2·F, …) <-> two of (E, F, …)."""


def _by_turns(arrays: Arrays, shapes: Shapes) -> Arrays:
    return tuple(arrays[0][..., part :: len(shapes)] for part in range(len(shapes)))


def _in_turn(arrays: Arrays, shapes: Shapes) -> Arrays:
    parts = [array[..., None] for array in arrays]
    return (concatenated(tuple(parts), shapes, axis=-1)[0].reshape(shapes[0]),)


def _turns_source(shapes: Shapes, keys: int) -> Shapes:
    if len(set(shapes)) != 1 or not shapes[0]:
        raise MisfitError(f"alternating expects parts of one shape, got {[*shapes]}")
    return ((*shapes[0][:-1], shapes[0][-1] * len(shapes)),)


def _turns_target(shapes: Shapes, paths: int, sizes: Sizes) -> Shapes:
    (shape,) = shapes
    if not shape or shape[-1] % paths:
        expected = f"a last axis of {paths} equal parts"
        raise MisfitError(f"alternating expects {expected}, got {[*shape]}")
    return ((*shape[:-1], shape[-1] // paths),) * paths


alternating = Step("alternating", _turns_source, _turns_target, _by_turns, _in_turn, "split")
"""One tensor <-> several, whose features take turns on its last axis: (…, 2·F), gate and up of each
feature side by side, <-> two of (…, F)."""


def _flat_shapes(shapes: Shapes, keys: int) -> Shapes:
    for shape in shapes:
        if len(shape) < 2 or {*shape[1:]} != {1}:
            raise MisfitError(f"conv_bias expects axes (out, 1, …) in JAX, got {list(shape)}")
    return tuple(shape[:1] for shape in shapes)


def _unknown_shapes(shapes: Shapes, paths: int, sizes: Sizes) -> Shapes:
    raise MisfitError("conv_bias: the torch shape does not tell how many axes follow")


def _reshaped(arrays: Arrays, shapes: Shapes) -> Arrays:
    return tuple(array.reshape(shape) for array, shape in zip(arrays, shapes, strict=True))


conv_bias = Step("conv_bias", _flat_shapes, _unknown_shapes, _reshaped, _reshaped)
"""torch.nn.Conv2d's bias (out,) <-> Equinox's (out, 1, 1); also 1d and 3d."""
