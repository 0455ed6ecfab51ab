"""Read and write elements by their indices."""

import jax
import jax.numpy as jnp
from jax import Array


def along(index: Array, axis: int) -> tuple[Array, ...]:
    """Return indices for `x.at[...]` that mean what `jnp.take_along_axis` means by `index`."""
    indices = list(jnp.indices(index.shape, sparse=True))
    indices[axis] = index
    return tuple(indices)


def scatter_mean(x: Array, index: tuple[Array, ...], src: Array, include_self: bool) -> Array:
    """Average the elements of src that go to one place of x, and x itself if it is included."""
    if not include_self:
        x = x.at[index].set(0)
    counts = jnp.full(x.shape, float(include_self), x.dtype).at[index].add(1)
    return x.at[index].add(src) / jnp.maximum(counts, 1)


def scatter_max(x: Array, index: tuple[Array, ...], src: Array, include_self: bool) -> Array:
    """Take the largest of the elements of src that go to one place, shared among equals."""

    def only_gradient(x: Array) -> Array:
        return jnp.where(jnp.isfinite(x), x - jax.lax.stop_gradient(x), 0)

    base = x if include_self else x.at[index].set(-jnp.inf)
    largest = jax.lax.stop_gradient(base).at[index].max(jax.lax.stop_gradient(src))
    chosen = src == largest[index]
    # torch counts x among the equals even where it is not included.
    counts = (x == largest).astype(x.dtype).at[index].add(chosen)
    # A maximum by indices has no gradient in JAX: it comes by terms that are 0.
    ours = jnp.where(base == largest, only_gradient(base) / counts, 0)
    theirs = jnp.where(chosen, only_gradient(src) / counts[index], 0)
    return largest + ours.at[index].add(theirs)


def scatter_min(x: Array, index: tuple[Array, ...], src: Array, include_self: bool) -> Array:
    """Take the smallest of the elements of src that go to one place, shared among equals."""
    return -scatter_max(-x, index, -src, include_self)


def masked_scatter(x: Array, mask: Array, source: Array) -> Array:
    """Put the elements of source, in their order, where mask is True."""
    x, mask = jnp.broadcast_arrays(x, mask)
    order = jnp.cumsum(mask.ravel()).reshape(x.shape) - 1
    return jnp.where(mask, source.ravel()[order], x)


def embedded(weight: Array, indices: Array, padding_idx: int) -> Array:
    """Look up rows; that of the padding receives no gradient."""
    rows = weight[indices]
    return jnp.where((indices == padding_idx)[..., None], jax.lax.stop_gradient(rows), rows)


def embedding_bag(
    weight: Array,
    indices: Array,
    offsets: Array,
    mean: bool = False,
    sample_weights: Array | None = None,
    padding_idx: int | None = None,
) -> Array:
    """Sum or average rows by bags: bag i has the indices from offsets[i] on."""
    counted = jnp.ones(indices.shape, weight.dtype)
    if padding_idx is not None:
        counted = (indices != padding_idx).astype(weight.dtype)
    weights = counted if sample_weights is None else counted * sample_weights
    bags = jnp.searchsorted(offsets, jnp.arange(len(indices)), side="right") - 1
    out = jnp.zeros((len(offsets), weight.shape[1]), weight.dtype)
    out = out.at[bags].add(weight[indices] * weights[:, None])
    if mean:
        counts = jnp.zeros(len(offsets), weight.dtype).at[bags].add(counted)
        out = out / jnp.maximum(counts, 1)[:, None]
    return out


def bottom_k(x: Array, k: int, axis: int = -1) -> tuple[Array, Array]:
    """Return the k smallest elements along an axis, and their indices."""
    indices = jax.lax.slice_in_dim(jnp.argsort(x, axis=axis), 0, k, axis=axis)
    return jnp.take_along_axis(x, indices, axis=axis), indices


def sort_descending(x: Array, axis: int = -1) -> tuple[Array, Array]:
    """Sort from the largest on, with equals in their order, and return the indices too."""
    indices = jnp.argsort(x, axis=axis, descending=True)
    return jnp.take_along_axis(x, indices, axis=axis), indices
