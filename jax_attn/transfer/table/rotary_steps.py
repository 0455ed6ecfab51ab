"""Steps between the two orders of rotary pairs."""

import numpy as np

from jax_attn.transfer.table.step import Arrays, Carry, HeadSizes, Shapes, Step, expect


def to_half_split(dim: int | None = None) -> Step:
    """Rotary pairs (2m, 2m + 1) in torch <-> pairs (m, m + dim/2) in Flax, along the last axis.

    Place it behind `heads` in the rows of q_proj and k_proj, weight and bias, and alone in those of
    q_norm and k_norm: it fits Meta's weights to a module that rotates half-split pairs. dim: how
    many features of a head are rotated, from the first on; None for all. Raises ValueError for
    anything but an even int ≥ 2.
    """
    return _repaired("to_half_split", dim, _halves(dim), _interlaced(dim))


def to_interleaved(dim: int | None = None) -> Step:
    """Rotary pairs (m, m + dim/2) in torch <-> pairs (2m, 2m + 1) in Flax: the other direction."""
    return _repaired("to_interleaved", dim, _interlaced(dim), _halves(dim))


def _repaired(name: str, dim: int | None, forward: Carry, backward: Carry) -> Step:
    if not (dim is None or (isinstance(dim, int) and dim >= 2 and dim % 2 == 0)):
        raise ValueError(f"{name}: dim: expected an even int ≥ 2, or None, got {dim!r}")
    name = name if dim is None else f"{name}({dim})"
    expected = "an even last axis" if dim is None else f"a last axis of at least {dim}"

    def source(shapes: Shapes, keys: int) -> Shapes:
        for shape in shapes:
            width = shape[-1] if shape else 0
            fits = width > 0 and (width % 2 == 0 if dim is None else width >= dim)
            expect(name, shape, f"{expected} (…, H)", fits)
        return shapes

    def target(shapes: Shapes, paths: int, sizes: HeadSizes) -> Shapes:
        return shapes

    return Step(name, source, target, forward, backward)


def _halves(dim: int | None) -> Carry:
    """Of the first `dim` features, those at even places, then those at odd ones."""

    def apply(arrays: Arrays, shapes: Shapes) -> Arrays:
        ends = [array.shape[-1] if dim is None else dim for array in arrays]
        return tuple(
            np.concatenate([a[..., :end:2], a[..., 1:end:2], a[..., end:]], axis=-1)
            for a, end in zip(arrays, ends, strict=True)
        )

    return apply


def _interlaced(dim: int | None) -> Carry:
    """The inverse: of the first `dim` features, those of both halves by turns."""

    def apply(arrays: Arrays, shapes: Shapes) -> Arrays:
        copies = tuple(array.copy() for array in arrays)
        for array, out in zip(arrays, copies, strict=True):
            end = array.shape[-1] if dim is None else dim
            out[..., :end:2], out[..., 1:end:2] = array[..., : end // 2], array[..., end // 2 : end]
        return copies

    return apply
