"""Compute what convolutions and pools of torch need beyond JAX's."""

import jax.numpy as jnp
from jax import Array


def transposed_kernel(weight: Array, groups: int) -> Array:
    """Turn the kernel of a transposed convolution in groups into that of a convolution."""
    inputs, outputs, *sizes = weight.shape
    weight = weight.reshape(groups, inputs // groups, outputs, *sizes).swapaxes(1, 2)
    weight = weight.reshape(groups * outputs, inputs // groups, *sizes)
    return jnp.flip(weight, range(2, weight.ndim))


def window_argmax(x: Array, places: list[Array]) -> Array:
    """Return the index into the flattened last axes of the largest element of each window.

    `places` has an array of an axis's positions by window and by place in it, -1 for none.
    """
    axes = len(places)
    sizes = x.shape[-axes:]
    flat, inside = jnp.zeros((), int), jnp.ones((), bool)
    for axis, (place, size) in enumerate(zip(places, sizes, strict=True)):
        shape = [1] * (2 * axes)
        shape[axis], shape[axes + axis] = place.shape
        flat = flat * size + place.reshape(shape)
        inside = inside & (place.reshape(shape) >= 0)
    windows = flat.shape[:axes]
    flat, inside = (each.reshape(*windows, -1) for each in (flat, inside))
    values = jnp.where(inside, x.reshape(*x.shape[:-axes], -1)[..., flat], -jnp.inf)
    best = jnp.argmax(values, -1)
    flat = jnp.broadcast_to(flat, values.shape)
    return jnp.take_along_axis(flat, best[..., None], axis=-1)[..., 0]


def max_pool_indices(
    x: Array,
    window: tuple[int, ...],
    strides: tuple[int, ...],
    dilation: tuple[int, ...],
    padding: list[tuple[int, int]],
) -> Array:
    """Return the index, into the flattened last axes, of each maximum of a pool."""
    places = []
    for size, width, stride, by, (low, high) in zip(
        x.shape[-len(window) :], window, strides, dilation, padding, strict=True
    ):
        count = (size + low + high - by * (width - 1) - 1) // stride + 1
        place = jnp.arange(count)[:, None] * stride + jnp.arange(width) * by - low
        places.append(jnp.where((place >= 0) & (place < size), place, -1))
    return window_argmax(x, places)


def dilated_max_pool(
    x: Array,
    window: tuple[int, ...],
    strides: tuple[int, ...],
    dilation: tuple[int, ...],
    padding: list[tuple[int, int]],
) -> tuple[Array, Array]:
    """Take maxima as `jax.lax.reduce_window`, which has no gradient of a dilated window."""
    indices = max_pool_indices(x, window, strides, dilation, padding)
    return at_flat(x, indices, len(window)), indices


def adaptive_max_pool(x: Array, sizes: tuple[int, ...]) -> tuple[Array, Array]:
    """Take the maxima of windows that cover the last axes, and their indices once flattened."""
    places = []
    for have, size in zip(x.shape[-len(sizes) :], sizes, strict=True):
        starts, ends = adaptive_bounds(have, size)
        place = starts[:, None] + jnp.arange(-(-have // size) + 1)
        places.append(jnp.where(place < ends[:, None], place, -1))
    indices = window_argmax(x, places)
    return at_flat(x, indices, len(sizes)), indices


def at_flat(x: Array, indices: Array, axes: int) -> Array:
    """Take elements by their indices into the flattened last axes."""
    leading = x.shape[:-axes]
    taken = jnp.take_along_axis(x.reshape(*leading, -1), indices.reshape(*leading, -1), axis=-1)
    return taken.reshape(indices.shape)


def adaptive_bounds(have: int, size: int) -> tuple[Array, Array]:
    """Return where each of `size` windows over an axis of `have` elements starts and ends."""
    window = jnp.arange(size)
    return window * have // size, -(-(window + 1) * have // size)


def adaptive_avg_pool(x: Array, sizes: tuple[int, ...]) -> Array:
    """Average windows of nearly equal size that cover the last axes, `sizes` of them an axis."""
    for axis, size in zip(range(-len(sizes), 0), sizes, strict=True):
        starts, ends = adaptive_bounds(x.shape[axis], size)
        place = jnp.arange(x.shape[axis])
        inside = (starts[:, None] <= place) & (place < ends[:, None])
        weights = (inside / inside.sum(-1, keepdims=True)).astype(x.dtype)
        x = jnp.moveaxis(jnp.tensordot(x, weights, (axis, 1), precision="highest"), -1, axis)
    return x


def col2im(
    x: Array,
    sizes: tuple[int, int],
    window: tuple[int, int],
    dilation: tuple[int, int],
    padding: tuple[int, int],
    strides: tuple[int, int],
) -> Array:
    """Add up the columns of windows where they lie in an image."""
    places = []
    for size, width, by, side, stride in zip(
        sizes, window, dilation, padding, strides, strict=True
    ):
        count = (size + 2 * side - by * (width - 1) - 1) // stride + 1
        places.append(jnp.arange(width)[:, None] * by + jnp.arange(count) * stride)
    rows, columns = places[0][:, None, :, None], places[1][None, :, None, :]
    (height, width), (top, left) = sizes, padding
    x = x.reshape(*x.shape[:-2], -1, *jnp.broadcast_shapes(rows.shape, columns.shape))
    image = jnp.zeros((*x.shape[:-4], height + 2 * top, width + 2 * left), x.dtype)
    image = image.at[..., rows, columns].add(x)
    return image[..., top : top + height, left : left + width]


def max_unpool(x: Array, indices: Array, sizes: tuple[int, int]) -> Array:
    """Put each element at its index into the flattened last axes of zeros."""
    leading = x.shape[:-2]
    flat = jnp.zeros((*leading, sizes[0] * sizes[1]), x.dtype)
    places = indices.reshape(*leading, -1)
    flat = jnp.put_along_axis(flat, places, x.reshape(*leading, -1), axis=-1, inplace=False)
    return flat.reshape(*leading, *sizes)
