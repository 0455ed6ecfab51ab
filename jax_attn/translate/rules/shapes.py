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


SHAPES: dict[str, Rule] = {
    "aten.view.default": reshaped,
    "aten.reshape.default": reshaped,
    "aten._unsafe_view.default": reshaped,
    "aten.expand.default": expanded,
    "aten.permute.default": permuted,
    "aten.transpose.int": transposed,
    "aten.t.default": matrix_transposed,
    "aten.unsqueeze.default": unsqueezed,
    "aten.squeeze.default": squeezed,
    "aten.squeeze.dim": squeezed,
    "aten.squeeze.dims": squeezed,
    "aten.select.int": selected,
    "aten.slice.Tensor": sliced,
    "aten.split.Tensor": split,
    "aten.split_with_sizes.default": split_with_sizes,
    "aten.chunk.default": chunk,
    "aten.unbind.int": unbound,
    "aten.cat.default": concatenated,
    "aten.stack.default": stacked,
    "aten.flip.default": flipped,
    "aten.repeat.default": "jnp.tile(self, repeats)",
    "aten.tile.default": "jnp.tile(self, dims)",
    "aten.tril.default": triangle("jnp.tril"),
    "aten.triu.default": triangle("jnp.triu"),
    "aten.clone.default": "self",
    "aten.alias.default": "self",
    "aten.contiguous.default": "self",
    "aten.lift_fresh_copy.default": "self",
    "aten.detach.default": "jax.lax.stop_gradient(self)",
}
