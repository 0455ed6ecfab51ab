"""Operators that place elements anew: shapes, order of axes, parts, joins."""

from collections.abc import Sequence
from typing import Any

from jax_attn.translate.rules.operands import axis, call, indexed, positive
from jax_attn.translate.rules.rule import Array, Rule, Size

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
            sizes.append(f"self.shape[{at}]" if isinstance(have, Size) else str(have))
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


def pieces(self: Array, dim: int, out: Sequence[Array], sizes: Sequence[str]) -> str:
    """Write the split of an axis in pieces of these sizes, by what the split gave."""
    lengths = [
        each.hint if isinstance(each, Size) else each for each in (o.shape[dim] for o in out)
    ]
    where = axis(dim, self.rank + 1)
    along = "" if where == "0" else f", axis={where}"
    if len(set(lengths)) == 1:
        return f"jnp.split(self, {len(out)}{along})"
    ends = [" + ".join(sizes[: n + 1]) for n in range(len(out) - 1)]
    if all(each.isdigit() for each in sizes):
        ends = [str(sum(map(int, sizes[: n + 1]))) for n in range(len(out) - 1)]
    return f"jnp.split(self, [{', '.join(ends)}]{along})"


def split(self: Array, split_size: Any, dim: int, out: Sequence[Array]) -> str:
    size = str(split_size) if isinstance(split_size, int) else "split_size"
    return pieces(self, dim, out, [size] * len(out))


def split_with_sizes(self: Array, split_sizes: Any, dim: int, out: Sequence[Array]) -> str:
    sizes = [
        str(each) if isinstance(each, int) else f"split_sizes[{position}]"
        for position, each in enumerate(split_sizes)
    ]
    return pieces(self, dim, out, sizes)


def chunk(self: Array, chunks: int, dim: int, out: Sequence[Array]) -> str:
    lengths = [each.shape[dim] for each in out]
    if len(set(lengths)) > 1 and any(isinstance(each, Size) for each in lengths):
        raise NotImplementedError("the last chunk of an axis whose size varies is shorter")
    return pieces(self, dim, out, [str(each) for each in lengths])


def unbound(dim: int) -> str:
    return call("jnp.unstack", "self", axis=dim or None)


def concatenated(tensors: Sequence[Array], dim: int) -> str:
    # Once a tensor of shape (0,) could be joined with any other; empty caches still are.
    rank = max(each.rank for each in tensors)
    joined = [
        f"tensors[{position}]"
        for position, each in enumerate(tensors)
        if each.shape != (0,) or rank == 1
    ]
    if len(joined) == 1:
        return joined[0]
    return call("jnp.concatenate", f"[{', '.join(joined)}]", axis=dim or None)


def stacked(tensors: Sequence[Array], dim: int) -> str:
    each = ", ".join(f"tensors[{position}]" for position in range(len(tensors)))
    return call("jnp.stack", f"[{each}]", axis=dim or None)


def flipped(self: Array, dims: Sequence[int]) -> str:
    if self.rank == 0 or not dims:
        return "self"
    return call("jnp.flip", "self", axis(dims, self.rank))


def triangle(function: str) -> Any:
    def rule(diagonal: Any) -> str:
        return call(function, "self", "diagonal" if diagonal != 0 else None)

    return rule


def size_of(self: Array, dim: int) -> str:
    """Write one length of `self`: a number, or what names it where it varies."""
    length = self.shape[dim]
    return f"self.shape[{dim}]" if isinstance(length, Size) else str(length)


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
        if start < 0:
            start += self.shape[dim]
        part = f"{start or ''}:{start + length}"
    else:
        part = "start:start + length" if start != 0 else ":length"
    return f"self[{indexed(dim, self.rank, part)}]"


def rolled(self: Array, shifts: Sequence[Any], dims: Sequence[int]) -> str:
    moves = "shifts[0]" if len(shifts) == 1 else "shifts"
    where = None if not dims else str(dims[0]) if len(dims) == 1 else str(tuple(dims))
    return call("jnp.roll", "self", moves, axis=where)


def diagonal(offset: int, dim1: int, dim2: int) -> str:
    given = None if (dim1, dim2) == (0, 1) else dim1, None if (dim1, dim2) == (0, 1) else dim2
    return call("self.diagonal", str(offset) if offset else None, axis1=given[0], axis2=given[1])


def diagonal_matrix(self: Array, offset: int, dim1: int, dim2: int) -> str:
    axes = [None, None] if (dim1, dim2) == (-2, -1) else [dim1, dim2]
    return call("diagonal_matrix", "self", offset=offset or None, axis1=axes[0], axis2=axes[1])


def diagonal_or_matrix(diagonal: int) -> str:
    return call("jnp.diag", "self", str(diagonal) if diagonal else None)


def grid(tensors: Sequence[Array], indexing: str = "ij") -> str:
    if any(each.rank == 0 for each in tensors):
        raise NotImplementedError("a grid of tensors without axes")
    return call("jnp.meshgrid", "*tensors", indexing='"ij"' if indexing == "ij" else None)


def windowed(dimension: int, self: Array) -> str:
    if self.rank == 0:
        raise NotImplementedError("windows of a tensor without axes")
    return f"windows(self, {positive(dimension, self.rank)}, size, step)"


def repeated(self: Array, out: Array, repeats: Any, dim: int | None = None) -> str:
    if isinstance(repeats, Array):
        length = out.shape[0 if dim is None else dim]
        if isinstance(length, Size):
            raise NotImplementedError("how often elements are repeated is known in the call alone")
        return call("jnp.repeat", "self", "repeats", axis=dim, total_repeat_length=length)
    return call("jnp.repeat", "self", "repeats", axis=dim)


def difference(self: Array, n: int, dim: int, prepend: Any, append: Any) -> str:
    return call(
        "jnp.diff",
        "self",
        n=n if n != 1 else None,
        axis=None if dim in (-1, self.rank - 1) else dim,
        prepend=None if prepend is None else "prepend",
        append=None if append is None else "append",
    )


def joined(function: str) -> Any:
    """Make the rule of a function of a list of tensors."""

    def rule(tensors: Sequence[Array]) -> str:
        each = ", ".join(f"tensors[{position}]" for position in range(len(tensors)))
        return f"{function}([{each}])"

    return rule


def each_of(function: str) -> Any:
    """Make the rule of a function of several tensors, with as many results."""

    def rule(tensors: Sequence[Array]) -> tuple[str, ...]:
        return tuple(f"{function}(tensors[{position}])" for position in range(len(tensors)))

    return rule


def tensor_split(self: Array, dim: int, out: Sequence[Array], indices: Any = None) -> str:
    lengths = [each.shape[dim] for each in out]
    if indices is None and any(isinstance(each, Size) for each in lengths):
        raise NotImplementedError("an axis whose size varies is split in unequal parts")
    if any(isinstance(each, Size) for each in indices or ()):
        raise NotImplementedError("an axis is split at places that vary")
    if indices is None:
        return pieces(self, dim, out, [str(each) for each in lengths])
    where = axis(dim, self.rank + 1)
    return call("jnp.split", "self", str(list(indices)), axis=None if where == "0" else where)


def rotated(k: int, dims: Sequence[int]) -> str:
    given = None if list(dims) == [0, 1] else str(tuple(dims))
    return call("jnp.rot90", "self", str(k) if k != 1 else None, axes=given)


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
    "diagonal.default": diagonal,
    "expand.default": expanded,
    "narrow.default": narrowed,
    "permute.default": permuted,
    "select.int": selected,
    "slice.Tensor": sliced,
    "split.Tensor": split,
    "split_with_sizes.default": split_with_sizes,
    "squeeze.default": squeezed,
    "squeeze.dim": squeezed,
    "squeeze.dims": squeezed,
    "t.default": matrix_transposed,
    "transpose.int": transposed,
    "unbind.int": unbound,
    "unfold.default": windowed,
    "unsqueeze.default": unsqueezed,
    "view.default": reshaped,
    "view.dtype": viewed,
}


def _copying(name: str) -> str:
    packet, overload = name.split(".")
    return f"aten.{packet}_copy.{overload}"


SHAPES: dict[str, Rule] = {
    **{f"aten.{name}": rule for name, rule in _VIEWS.items()},
    **{_copying(name): rule for name, rule in _VIEWS.items()},
    "aten.reshape.default": reshaped,
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
    "aten.split.sizes": lambda self, split_size, dim, out: split_with_sizes(
        self, split_size, dim, out
    ).replace("split_sizes", "split_size"),
    "aten.unsafe_split.Tensor": split,
    "aten.unsafe_split_with_sizes.default": split_with_sizes,
    "aten.chunk.default": chunk,
    "aten.unsafe_chunk.default": chunk,
    "aten.tensor_split.sections": tensor_split,
    "aten.tensor_split.indices": tensor_split,
    "aten.cat.default": concatenated,
    "aten.concat.default": concatenated,
    "aten.concatenate.default": concatenated,
    "aten.stack.default": stacked,
    **{
        f"aten.{name}.default": joined(f"jnp.{function}")
        for name, function in {
            "column_stack": "column_stack",
            "dstack": "dstack",
            "hstack": "hstack",
            "row_stack": "vstack",
            "vstack": "vstack",
        }.items()
    },
    "aten.block_diag.default": "jax.scipy.linalg.block_diag(*tensors)",
    "aten.flip.default": flipped,
    "aten.fliplr.default": "jnp.fliplr(self)",
    "aten.flipud.default": "jnp.flipud(self)",
    "aten.rot90.default": rotated,
    "aten.roll.default": rolled,
    "aten.diag.default": diagonal_or_matrix,
    "aten.diag_embed.default": diagonal_matrix,
    "aten.repeat.default": "jnp.tile(self, repeats)",
    "aten.tile.default": "jnp.tile(self, dims)",
    "aten.repeat_interleave.self_int": repeated,
    "aten.repeat_interleave.self_Tensor": repeated,
    "aten.tril.default": triangle("jnp.tril"),
    "aten.triu.default": triangle("jnp.triu"),
    "aten.meshgrid.default": grid,
    "aten.meshgrid.indexing": grid,
    "aten.broadcast_tensors.default": "jnp.broadcast_arrays(*tensors)",
    "aten.diff.default": difference,
    "aten.pixel_shuffle.default": "pixel_shuffle(self, upscale_factor)",
    "aten.pixel_unshuffle.default": "pixel_unshuffle(self, downscale_factor)",
    "aten.channel_shuffle.default": "channel_shuffle(self, groups)",
    "aten.native_channel_shuffle.default": "channel_shuffle(self, groups)",
    **{
        f"aten.atleast_{n}d.{overload}": rule
        for n in (1, 2, 3)
        for overload, rule in (
            ("default", f"jnp.atleast_{n}d(self)"),
            ("Sequence", each_of(f"jnp.atleast_{n}d")),
        )
    },
    "aten.clone.default": "self",
    "aten.contiguous.default": "self",
    "aten.lift_fresh_copy.default": "self",
    "aten.lift_fresh.default": "self",
}
