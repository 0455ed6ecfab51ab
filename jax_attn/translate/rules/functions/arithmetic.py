"""Compute on elements, axes and windows what a translated file may need."""

import jax
import jax.numpy as jnp
from jax import Array


def clamp(x: Array, low: Array | float | None = None, high: Array | float | None = None) -> Array:
    """Limit x; its gradient passes where x equals a limit."""
    if low is not None:
        x = jnp.where(x < low, low, x)
    if high is not None:
        x = jnp.where(x > high, high, x)
    return x


def safe_sqrt(x: Array) -> Array:
    """Return the square root, with gradient 0 at 0."""
    return jnp.where(x == 0, 0, jnp.sqrt(jnp.where(x == 0, 1, x)))


def digamma(x: Array) -> Array:
    """Return the digamma function; the gradient of JAX's is wrong below 0, so it is reflected."""
    value = jax.scipy.special.digamma(jnp.where(x > 0, x, 1 - x))
    place = jnp.where(x > 0, 0.5, x - jnp.round(x))
    place = jnp.where((place == 0) & (x < 0), jnp.nan, place)
    return jnp.where(x > 0, value, value - jnp.pi / jnp.tan(jnp.pi * place))


def safe_softmax(x: Array, axis: int = -1) -> Array:
    """Return the softmax, with 0 for a row that is -inf everywhere."""
    empty = jnp.isneginf(x).all(axis, keepdims=True)
    return jnp.where(empty, 0, jax.nn.softmax(jnp.where(empty, 0, x), axis))


def absolute(x: Array) -> Array:
    """Return the absolute value, with gradient 0 at 0."""
    return x * jnp.sign(x)


def hardtanh(x: Array, low: float = -1.0, high: float = 1.0) -> Array:
    """Limit x; its gradient is 0 at the limits."""
    return jnp.where(x <= low, low, jnp.where(x >= high, high, x))


def vector_norm(
    x: Array, order: float, axis: int | tuple[int, ...] | None = None, keepdims: bool = False
) -> Array:
    """Return (Σ |x|^order)^(1/order), with gradient 0 where it is 0."""
    powers = jnp.where(x == 0, 0, jnp.abs(jnp.where(x == 0, 1, x)) ** order)
    total = powers.sum(axis, keepdims=keepdims)
    return jnp.where(total == 0, 0, jnp.where(total == 0, 1, total) ** (1 / order))


def distances(x: Array, y: Array, order: float = 2.0) -> Array:
    """Return the distance of each row of x (..., P, M) to each of y (..., R, M), (..., P, R)."""
    return vector_norm(x[..., :, None, :] - y[..., None, :, :], order, -1)


def cosine_similarity(x: Array, y: Array, axis: int = 1, eps: float = 1e-8) -> Array:
    """Return the cosine of the angle between x and y, each of a length of at least eps."""
    lengths = [
        jnp.maximum(safe_sqrt(jnp.square(each).sum(axis, keepdims=True)), eps) for each in (x, y)
    ]
    return (x / lengths[0] * (y / lengths[1])).sum(axis)


def running_argmax(x: Array, axis: int) -> Array:
    """Return the index of the last maximum so far, along an axis."""
    index = jax.lax.broadcasted_iota(jnp.int32, x.shape, axis)
    is_new = (x >= jax.lax.cummax(x, axis)) | jnp.isnan(x)
    return jax.lax.cummax(jnp.where(is_new, index, 0), axis)


def windows(x: Array, axis: int, size: int, step: int) -> Array:
    """Return every window of an axis; places in it become the last axis."""
    starts = jnp.arange(0, x.shape[axis] - size + 1, step)
    return jnp.moveaxis(
        jnp.moveaxis(x, axis, -1)[..., starts[:, None] + jnp.arange(size)], -2, axis
    )


def diagonal_matrix(x: Array, offset: int = 0, axis1: int = -2, axis2: int = -1) -> Array:
    """Return matrices that have the last axis on a diagonal, and 0 elsewhere."""
    size = x.shape[-1] + abs(offset)
    place = jnp.arange(x.shape[-1])
    row, column = place - min(offset, 0), place + max(offset, 0)
    matrices = jnp.zeros((*x.shape[:-1], size, size), x.dtype).at[..., row, column].set(x)
    return jnp.moveaxis(matrices, (-2, -1), (axis1, axis2))


def pixel_shuffle(x: Array, factor: int) -> Array:
    """Turn (..., C·factor², H, W) into (..., C, H·factor, W·factor)."""
    *batch, channels, height, width = x.shape
    x = x.reshape(*batch, channels // factor**2, factor, factor, height, width)
    x = jnp.moveaxis(x, (-4, -3), (-3, -1))
    return x.reshape(*batch, channels // factor**2, height * factor, width * factor)


def pixel_unshuffle(x: Array, factor: int) -> Array:
    """Turn (..., C, H·factor, W·factor) into (..., C·factor², H, W)."""
    *batch, channels, height, width = x.shape
    x = x.reshape(*batch, channels, height // factor, factor, width // factor, factor)
    x = jnp.moveaxis(x, (-3, -1), (-4, -3))
    return x.reshape(*batch, channels * factor**2, height // factor, width // factor)


def channel_shuffle(x: Array, groups: int) -> Array:
    """Interleave the groups of the channels of (B, C, ...)."""
    batch, channels, *rest = x.shape
    return x.reshape(batch, groups, channels // groups, *rest).swapaxes(1, 2).reshape(x.shape)
