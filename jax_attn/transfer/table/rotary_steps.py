"""Steps between the two ways in which rotary pairs lie."""

from collections.abc import Callable

import numpy as np

from jax_attn.transfer.table.step import Arrays, HeadSizes, Shapes, Step, expect


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
            expect(name, shape, f"{wanted} (…, H)", fits)
        return shapes

    return source


def _turned_target(shapes: Shapes, paths: int, sizes: HeadSizes) -> Shapes:
    return shapes
