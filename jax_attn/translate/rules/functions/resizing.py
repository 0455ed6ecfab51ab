"""Resize images, and sample them by a grid."""

import jax.numpy as jnp
from jax import Array


def upsample_nearest(
    x: Array,
    sizes: tuple[int, ...],
    scales: tuple[float | None, ...] | None = None,
    exact: bool = False,
) -> Array:
    """Repeat the elements of the last axes; `exact` rounds from the middle of each."""
    for axis, size, scale in zip(
        range(-len(sizes), 0), sizes, scales or [None] * len(sizes), strict=True
    ):
        step = jnp.float32(1 / scale if scale else x.shape[axis] / size)
        place = jnp.floor((jnp.arange(size, dtype=jnp.float32) + exact * 0.5) * step)
        x = jnp.take(x, jnp.minimum(place.astype(int), x.shape[axis] - 1), axis=axis)
    return x


def resize(
    x: Array,
    sizes: tuple[int, ...],
    method: str = "linear",
    align_corners: bool = False,
    scales: tuple[float | None, ...] | None = None,
) -> Array:
    """Interpolate the last axes, as torch does: cubic with a = -0.75, edges repeated."""
    for axis, size, scale in zip(
        range(-len(sizes), 0), sizes, scales or [None] * len(sizes), strict=True
    ):
        have = x.shape[axis]
        place = jnp.arange(size, dtype=x.dtype)
        if align_corners:
            place = place * ((have - 1) / (size - 1) if size > 1 else 0.0)
        else:
            place = (place + 0.5) * (1 / scale if scale else have / size) - 0.5
        if method == "linear":
            place = jnp.maximum(place, 0)
        first = jnp.floor(place)
        if method == "linear":
            taps = {0: 1 - (place - first), 1: place - first}
        else:
            taps = {tap: cubic(jnp.abs(place - first - tap)) for tap in (-1, 0, 1, 2)}
        weights = jnp.zeros((size, have), x.dtype)
        for tap, weight in taps.items():
            column = jnp.clip(first.astype(int) + tap, 0, have - 1)
            weights = weights.at[jnp.arange(size), column].add(weight)
        x = jnp.moveaxis(jnp.tensordot(x, weights, (axis, 1), precision="highest"), -1, axis)
    return x


def cubic(distance: Array) -> Array:
    """Return the weight of a sample at a distance of up to 2."""
    near = (1.25 * distance - 2.25) * distance**2 + 1
    far = ((-0.75 * distance + 3.75) * distance - 6) * distance + 3
    return jnp.where(distance <= 1, near, far)


def grid_sample(
    x: Array,
    grid: Array,
    nearest: bool = False,
    padding: str | None = None,
    align_corners: bool = False,
) -> Array:
    """Sample (B, C, *sizes) at the places of a grid (B, *out, axes), whose axes come last first."""
    sizes = x.shape[2:]
    places = []
    for size, place in zip(sizes, jnp.moveaxis(grid, -1, 0)[::-1], strict=True):
        place = (place + 1) / 2 * (size - 1) if align_corners else ((place + 1) * size - 1) / 2
        if padding == "reflection":
            low, span = (0, size - 1) if align_corners else (-0.5, size)
            place = jnp.abs(place - low)
            turns, rest = (jnp.floor(place / span), place % span) if span else (place, place)
            place = jnp.where(turns % 2 == 0, rest, span - rest) + low if span else 0 * place
        if padding:
            place = jnp.where(place <= 0, 0, jnp.where(place >= size - 1, size - 1, place))
        places.append(place)
    firsts = [jnp.round(place) if nearest else jnp.floor(place) for place in places]
    out = jnp.zeros((), x.dtype)
    for corner in range(1 if nearest else 2 ** len(sizes)):
        weight = jnp.ones((), x.dtype)
        index = []
        for axis, (size, place, first) in enumerate(zip(sizes, places, firsts, strict=True)):
            at = first + (corner >> axis & 1)
            if not nearest:
                weight = weight * (1 - jnp.abs(place - at))
            weight = jnp.where((at >= 0) & (at < size), weight, 0)
            index.append(jnp.clip(at, 0, size - 1).astype(int))
        batch = jnp.arange(len(x)).reshape(-1, *[1] * len(sizes))
        out = out + jnp.moveaxis(x, 1, -1)[batch, *index] * weight[..., None]
    return jnp.moveaxis(out, -1, 1)


def affine_grid(theta: Array, sizes: tuple[int, ...], align_corners: bool = False) -> Array:
    """Return the places (B, *sizes, axes) to which affine maps (B, axes, axes + 1) send a grid."""
    lines = []
    for size in sizes:
        line = (
            jnp.linspace(-1, 1, size, dtype=theta.dtype) if size > 1 else jnp.zeros(1, theta.dtype)
        )
        lines.append(line if align_corners else line * (size - 1) / size)
    grid = jnp.meshgrid(*lines, indexing="ij")[::-1]
    places = jnp.stack([*grid, jnp.ones_like(grid[0])], axis=-1)
    return jnp.einsum("...k,bik->b...i", places, theta)
