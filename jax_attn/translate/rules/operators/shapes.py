"""Write operators that place elements anew: shapes, order of axes, slices."""

from collections.abc import Sequence
from typing import Any

from jax_attn.translate.rules.calls import indexed
from jax_attn.translate.rules.operands import axis, copying_too, positive
from jax_attn.translate.rules.rule import Array, Rule, VaryingSize

END = 2**63 - 1


def reshaped(size: Sequence[Any]) -> str:
    return "self.reshape(*size)" if size else "self.reshape(())"


def expanded(self: Array, size: Sequence[Any]) -> str:
    added = len(size) - self.rank
    lengths = [None] * added + list(self.shape)
    sizes = []
    for position, (asked, have) in enumerate(zip(size, lengths, strict=True)):
        if asked == -1:
            at = position - added
            sizes.append(f"self.shape[{at}]" if isinstance(have, VaryingSize) else str(have))
        else:
            sizes.append(f"size[{position}]")
    same = all(a == -1 or a == b for a, b in zip(size, lengths, strict=True))
    if not added and same:
        return "self"
    return f"jnp.broadcast_to(self, ({', '.join(sizes)},))"


def permuted(self: Array, dims: Sequence[int]) -> str:
    order = [positive(dim, self.rank) for dim in dims]
    moved = [position for position, dim in enumerate(order) if position != dim]
    if not moved:
        return "self"
    if self.rank == 2:
        return "self.T"
    if len(moved) == 2:
        return f"self.swapaxes({moved[0]}, {moved[1]})"
    return f"self.transpose({', '.join(map(str, order))})"


def transposed(self: Array, dim0: int, dim1: int) -> str:
    if self.rank == 0 or positive(dim0, self.rank) == positive(dim1, self.rank):
        return "self"
    return "self.T" if self.rank == 2 else f"self.swapaxes({dim0}, {dim1})"


def matrix_transposed(self: Array) -> str:
    return "self" if self.rank < 2 else "self.T"


def unsqueezed(self: Array, dim: int) -> str:
    return f"self[{indexed(dim, self.rank + 1, 'None')}]"


def squeezed(self: Array, dim: Any = None) -> str:
    asked = range(self.rank) if dim is None else [dim] if isinstance(dim, int) else dim
    ones = [each for each in asked if self.rank and self.shape[each] == 1]
    if not ones:
        return "self"
    if len(ones) == self.rank:
        return "self.squeeze()"
    return f"self.squeeze({axis(ones, self.rank)})"


def selected(self: Array, dim: int, index: Any) -> str:
    return f"self[{indexed(dim, self.rank, 'index')}]"


def sliced(self: Array, dim: int, start: Any, end: Any, step: Any) -> str:
    length = self.shape[dim]
    first = "" if start in (None, 0) else "start"
    fixed = isinstance(end, int) and isinstance(length, int)
    last = "" if end is None or end == END or (fixed and end >= length) else "end"
    stride = "" if step == 1 else ":step"
    if not (first or last or stride):
        return "self"
    return f"self[{indexed(dim, self.rank, f'{first}:{last}{stride}')}]"


def size_of(self: Array, dim: int) -> str:
    """Write one length of `self`: a number, or what names it where it varies."""
    length = self.shape[dim]
    return f"self.shape[{dim}]" if isinstance(length, VaryingSize) else str(length)


def flattened(self: Array, start_dim: int = 0, end_dim: int = -1) -> str:
    if self.rank < 2:
        return "self.reshape(1)" if self.rank == 0 else "self"
    first, last = positive(start_dim, self.rank), positive(end_dim, self.rank)
    if first == last:
        return "self"
    kept = [size_of(self, dim) for dim in range(first)]
    kept += ["-1"] + [size_of(self, dim) for dim in range(last + 1, self.rank)]
    return f"self.reshape({', '.join(kept)})"


def unflattened(self: Array, dim: int, sizes: Sequence[Any]) -> str:
    at = positive(dim, self.rank)
    parts = [size_of(self, each) for each in range(at)]
    parts += [f"sizes[{position}]" for position in range(len(sizes))]
    parts += [size_of(self, each) for each in range(at + 1, self.rank)]
    return f"self.reshape({', '.join(parts)})"


def moved(source: Any, destination: Any, self: Array) -> str:
    if self.rank == 0:
        return "self"
    both = [
        each[0] if isinstance(each, list) and len(each) == 1 else each
        for each in (source, destination)
    ]
    return "jnp.moveaxis(self, {}, {})".format(
        *(tuple(each) if isinstance(each, list) else each for each in both)
    )


def narrowed(self: Array, dim: int, start: Any, length: Any) -> str:
    if isinstance(start, int) and isinstance(length, int):
        end = start + length
        part = f"{start or ''}:{end if end or not start else ''}"
    else:
        part = "start:start + length" if start != 0 else ":length"
    return f"self[{indexed(dim, self.rank, part)}]"


def shaped_like(self: Array) -> str:
    return "self.reshape(other.shape)"


def expanded_like(self: Array, out: Array) -> str:
    return "self" if self.shape == out.shape else "jnp.broadcast_to(self, other.shape)"


def adjoint(self: Array) -> str:
    return "self.mT.conj()" if self.dtype.startswith("complex") else "self.mT"


def viewed(dtype: Any, self: Array, out: Array) -> str:
    if self.dtype == out.dtype:
        return "self"
    raise NotImplementedError("the bits of a tensor are read as another dtype")


_VIEWS: dict[str, Rule] = {
    "alias.default": "self",
    "detach.default": "jax.lax.stop_gradient(self)",
    "expand.default": expanded,
    "narrow.default": narrowed,
    "permute.default": permuted,
    "select.int": selected,
    "slice.Tensor": sliced,
    "squeeze.default": squeezed,
    "squeeze.dim": squeezed,
    "squeeze.dims": squeezed,
    "t.default": matrix_transposed,
    "transpose.int": transposed,
    "unsqueeze.default": unsqueezed,
    "view.default": reshaped,
    "view.dtype": viewed,
}


SHAPES: dict[str, Rule] = {
    **copying_too(_VIEWS),
    "aten.reshape.default": lambda shape: reshaped(shape).replace("size", "shape"),
    "aten._unsafe_view.default": reshaped,
    "aten._reshape_alias.default": reshaped,
    "aten._reshape_copy.default": reshaped,
    "aten.view_as.default": shaped_like,
    "aten.reshape_as.default": shaped_like,
    "aten.expand_as.default": expanded_like,
    "aten.broadcast_to.default": expanded,
    "aten.flatten.using_ints": flattened,
    "aten.ravel.default": flattened,
    "aten.unflatten.int": unflattened,
    "aten.swapaxes.default": lambda self, axis0, axis1: transposed(self, axis0, axis1).replace(
        "dim", "axis"
    ),
    "aten.swapdims.default": transposed,
    "aten.numpy_T.default": "self.T",
    "aten.matrix_H.default": adjoint,
    "aten.adjoint.default": adjoint,
    "aten.mH.default": adjoint,
    "aten.mT.default": "self.mT",
    "aten.movedim.int": moved,
    "aten.movedim.intlist": moved,
    "aten.moveaxis.int": moved,
    "aten.moveaxis.intlist": moved,
    "aten.clone.default": "self",
    "aten.contiguous.default": "self",
    "aten.lift_fresh_copy.default": "self",
    "aten.lift_fresh.default": "self",
    "aten.resolve_conj.default": "self",
    "aten.resolve_neg.default": "self",
}
