"""Write operators that take a tensor apart, join tensors, or repeat and move their elements."""

from collections.abc import Sequence
from typing import Any

from jax_attn.translate.rules.calls import call, expect_axes
from jax_attn.translate.rules.operands import axis, copying_too, positive
from jax_attn.translate.rules.rule import Array, Rule, VaryingSize


def pieces(self: Array, dim: int, out: Sequence[Array], sizes: Sequence[str]) -> str:
    """Write the split of an axis in pieces of these sizes, by what the split gave."""
    lengths = [
        each.hint if isinstance(each, VaryingSize) else each for each in (o.shape[dim] for o in out)
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
    if len(set(lengths)) > 1 and any(isinstance(each, VaryingSize) for each in lengths):
        raise NotImplementedError("the last chunk of an axis whose size varies is shorter")
    return pieces(self, dim, out, [str(each) for each in lengths])


def tensor_split(self: Array, dim: int, out: Sequence[Array], indices: Any = None) -> str:
    lengths = [each.shape[dim] for each in out]
    if indices is None and any(isinstance(each, VaryingSize) for each in lengths):
        raise NotImplementedError("an axis whose size varies is split in unequal parts")
    if any(isinstance(each, VaryingSize) for each in indices or ()):
        raise NotImplementedError("an axis is split at places that vary")
    if indices is None:
        return pieces(self, dim, out, [str(each) for each in lengths])
    where = axis(dim, self.rank + 1)
    return call("jnp.split", "self", str(list(indices)), axis=None if where == "0" else where)


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


def flipped(self: Array, dims: Sequence[int]) -> str:
    if self.rank == 0 or not dims:
        return "self"
    return call("jnp.flip", "self", axis(dims, self.rank))


def rotated(k: int, dims: Sequence[int]) -> str:
    given = None if list(dims) == [0, 1] else str(tuple(dims))
    return call("jnp.rot90", "self", str(k) if k != 1 else None, axes=given)


def rolled(self: Array, shifts: Sequence[Any], dims: Sequence[int]) -> str:
    moves = "shifts[0]" if len(shifts) == 1 else "shifts"
    where = None if not dims else str(dims[0]) if len(dims) == 1 else str(tuple(dims))
    return call("jnp.roll", "self", moves, axis=where)


def repeated(self: Array, out: Array, repeats: Any, dim: int | None = None) -> str:
    if isinstance(repeats, Array):
        length = out.shape[0 if dim is None else dim]
        if isinstance(length, VaryingSize):
            raise NotImplementedError("how often elements are repeated is known in the call alone")
        return call("jnp.repeat", "self", "repeats", axis=dim, total_repeat_length=length)
    return call("jnp.repeat", "self", "repeats", axis=dim)


def windowed(dimension: int, self: Array) -> str:
    expect_axes("windows", self)
    return f"windows(self, {positive(dimension, self.rank)}, size, step)"


def grid(tensors: Sequence[Array], indexing: str = "ij") -> str:
    expect_axes("a grid", *tensors)
    return call("jnp.meshgrid", "*tensors", indexing='"ij"' if indexing == "ij" else None)


def difference(self: Array, n: int, dim: int, prepend: Any, append: Any) -> str:
    return call(
        "jnp.diff",
        "self",
        n=n if n != 1 else None,
        axis=None if dim in (-1, self.rank - 1) else dim,
        prepend=None if prepend is None else "prepend",
        append=None if append is None else "append",
    )


def triangle(function: str) -> Any:
    def rule(diagonal: Any) -> str:
        return call(function, "self", "diagonal" if diagonal != 0 else None)

    return rule


def diagonal(offset: int, dim1: int, dim2: int) -> str:
    given = None if (dim1, dim2) == (0, 1) else dim1, None if (dim1, dim2) == (0, 1) else dim2
    return call("self.diagonal", str(offset) if offset else None, axis1=given[0], axis2=given[1])


def diagonal_matrix(self: Array, offset: int, dim1: int, dim2: int) -> str:
    axes = [None, None] if (dim1, dim2) == (-2, -1) else [dim1, dim2]
    return call("diagonal_matrix", "self", offset=offset or None, axis1=axes[0], axis2=axes[1])


def diagonal_or_matrix(diagonal: int) -> str:
    return call("jnp.diag", "self", str(diagonal) if diagonal else None)


_VIEWS: dict[str, Rule] = {
    "diagonal.default": diagonal,
    "split.Tensor": split,
    "split_with_sizes.default": split_with_sizes,
    "unbind.int": unbound,
    "unfold.default": windowed,
}

PARTS: dict[str, Rule] = {
    **copying_too(_VIEWS),
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
}
