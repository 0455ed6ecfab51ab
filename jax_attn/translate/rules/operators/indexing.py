"""Write operators that read or write elements by their indices."""

from collections.abc import Sequence
from typing import Any

from jax_attn.translate.rules.calls import call, cast, expect_axes, indexed, number, refused
from jax_attn.translate.rules.operators.scattering import cut
from jax_attn.translate.rules.rule import Array, Rule, VaryingSize

_SELECTS = "the number of elements that a boolean mask selects is unknown before the call"


def _subscript(indices: Sequence[Array | None]) -> str:
    """Write `:, indices[1]`; trailing axes are left out."""
    return (
        ", ".join(
            ":" if index is None else f"indices[{i}]" for i, index in enumerate(indices)
        ).rstrip(", :")
        or "..."
    )


def _boolean(indices: Sequence[Array | None]) -> bool:
    return any(index is not None and index.dtype in ("bool", "uint8") for index in indices)


def index(indices: Sequence[Array | None]) -> str:
    if _boolean(indices):
        raise NotImplementedError(_SELECTS)
    return f"self[{_subscript(indices)}]"


def index_put(self: Array, indices: Sequence[Array | None], values: Array, accumulate: bool) -> str:
    if not _boolean(indices):
        return f"self.at[{_subscript(indices)}].{'add' if accumulate else 'set'}(values)"
    masks = [(axis, each) for axis, each in enumerate(indices) if each is not None]
    place, mask = masks[0]
    if len(masks) > 1 or mask.dtype != "bool":
        raise NotImplementedError(_SELECTS)
    rest = self.rank - place - mask.rank
    new, condition = "values", f"indices[{place}]"
    if not place and values.rank == rest + 1 and values.shape[0] == 1:
        new = "values[0]"
    elif values.rank > rest:
        raise NotImplementedError(_SELECTS)
    if rest:
        condition += f"[{', '.join(['...'] + ['None'] * rest)}]"
    return f"jnp.where({condition}, {f'self + {new}' if accumulate else new}, self)"


def index_select(self: Array, dim: int, index: Array) -> str:
    if self.rank == 0:
        return "self"
    return f"self[{indexed(dim, self.rank, 'index' if index.rank else 'index[None]')}]"


def gather(self: Array, dim: int, index: Array) -> str:
    expect_axes("gather", self, index)
    return f"jnp.take_along_axis({cut('self', self, index, dim % self.rank)}, index, axis={dim})"


def take_along_dim(dim: int | None) -> str:
    if dim is None:
        return "self.ravel()[indices.ravel()]"
    return f"jnp.take_along_axis(self, indices, axis={dim})"


def _at_rows(self: Array, dim: int, index: Array, written: str) -> str:
    """Write into rows along an axis."""
    expect_axes("rows that are written", self)
    row = indexed(dim, self.rank, "index" if index.rank else "index[None]")
    return f"self.at[{row}].{written}"


def index_add(self: Array, dim: int, index: Array, alpha: Any) -> str:
    return _at_rows(self, dim, index, f"add({'source' if alpha == 1 else 'alpha * source'})")


def index_copy(self: Array, dim: int, index: Array) -> str:
    return _at_rows(self, dim, index, "set(source)")


def index_fill(self: Array, dim: int, index: Array, value: Any) -> str:
    return _at_rows(self, dim, index, f"set({_as_element(self, value)})")


def _as_element(self: Array, value: Any) -> str:
    """Write a tensor, or a number, in the dtype of the tensor that takes it."""
    if isinstance(value, Array):
        return cast("value", value, self.dtype)
    return number(value, self.dtype)


def put(accumulate: bool) -> str:
    method = "add" if accumulate else "set"
    return f"self.ravel().at[index.ravel()].{method}(source.ravel()).reshape(self.shape)"


_END = 2**63 - 1


def slice_scatter(self: Array, src: Array, dim: int, start: Any, end: Any, step: Any) -> str:
    first = "" if start in (None, 0) else "start"
    last = "" if end is None or end == _END or end == self.shape[dim] else "end"
    if not first and not last and step == 1:
        return copy(self, src)
    part = f"{first}:{last}" + ("" if step == 1 else ":step")
    return f"self.at[{indexed(dim, self.rank, part)}].set(src)"


def select_scatter(self: Array, dim: int) -> str:
    return f"self.at[{indexed(dim, self.rank, 'index')}].set(src)"


def diagonal_scatter(self: Array, offset: int, dim1: int, dim2: int) -> str:
    rows, columns = dim1 % self.rank, dim2 % self.rank
    each = [":"] * self.rank
    for axis, by in ((rows, max(-offset, 0)), (columns, max(offset, 0))):
        each[axis] = "jnp.arange(src.shape[-1])" + (f" + {by}" if by else "")
    # NumPy puts the axis of two index arrays at their place if they are neighbours, else first.
    place = min(rows, columns) if abs(rows - columns) == 1 else 0
    source = "src" if place == self.rank - 2 else f"jnp.moveaxis(src, -1, {place})"
    return f"self.at[{', '.join(each)}].set({source})"


def copy(self: Array, src: Array) -> str:
    source = cast("src", src, self.dtype)
    return source if src.shape == self.shape else f"jnp.broadcast_to({source}, self.shape)"


def fill(self: Array, value: Any) -> str:
    if not isinstance(value, (Array, VaryingSize)) and value in (0, 1):
        return f"jnp.{'ones' if value else 'zeros'}_like(self)"
    return f"jnp.full_like(self, {_as_element(self, value)})"


def masked_fill(self: Array, value: Any) -> str:
    return f"jnp.where(mask, {_as_element(self, value)}, self)"


def embedding(padding_idx: Any, scale_grad_by_freq: bool) -> str:
    if scale_grad_by_freq:
        raise NotImplementedError("an embedding whose gradient is divided by frequencies")
    return "weight[indices]" if padding_idx == -1 else "embedded(weight, indices, padding_idx)"


def embedding_bag(
    scale_grad_by_freq: bool,
    mode: int,
    per_sample_weights: Array | None,
    include_last_offset: bool,
    padding_idx: int | None = None,
) -> tuple[str, ...]:
    if scale_grad_by_freq or mode == 2:
        raise NotImplementedError(
            "an embedding bag of maxima, or whose gradient is divided by frequencies"
        )
    offsets = "offsets[:-1]" if include_last_offset else "offsets"
    bags = call(
        "embedding_bag",
        "weight",
        "indices",
        offsets,
        mean="True" if mode == 1 else None,
        sample_weights=None if per_sample_weights is None else "per_sample_weights",
        padding_idx=None if padding_idx in (None, -1) else "padding_idx",
    )
    # The other outputs serve torch's own gradient.
    return bags, "None", "None", "None"


def one_hot(num_classes: Any) -> str:
    if num_classes == -1:
        raise NotImplementedError("one_hot whose number of classes is the largest index")
    return "jax.nn.one_hot(self, num_classes, dtype=int)"


def topk(self: Array, dim: int, largest: bool) -> str:
    expect_axes("topk", self)
    axis = None if dim % self.rank == self.rank - 1 else dim
    return call("jax.lax.top_k" if largest else "bottom_k", "self", "k", axis=axis)


def _sorting(function: str, self: Array, dim: int, descending: bool = False) -> str:
    expect_axes("sorting", self)
    axis = None if dim % self.rank == self.rank - 1 else dim
    return call(function, "self", axis=axis, descending=True if descending else None)


def sort(self: Array, dim: int, descending: bool) -> str | tuple[str, ...]:
    if descending:
        return _sorting("sort_descending", self, dim)
    return _sorting("jnp.sort", self, dim), _sorting("jnp.argsort", self, dim)


def argsort(self: Array, dim: int, descending: bool) -> str:
    return _sorting("jnp.argsort", self, dim, descending)


def kthvalue(self: Array, k: Any, dim: int, keepdim: bool) -> tuple[str, ...]:
    expect_axes("kthvalue", self)
    before = f"{k - 1}" if isinstance(k, int) else "k - 1"
    place = indexed(dim, self.rank, f"{before}:k" if keepdim else before)
    return tuple(f"{_sorting(each, self, dim)}[{place}]" for each in ("jnp.sort", "jnp.argsort"))


def _search(sequence: str, rank: int, values: str, side: str) -> str:
    right = "side='right'" if side == "right" else None
    if rank < 2:
        return call("jnp.searchsorted", sequence, values, right)
    each = call("jnp.searchsorted", "row", "each", right)
    return (
        f"jnp.vectorize(lambda row, each: {each}, signature='(n),(m)->(m)')({sequence}, {values})"
    )


def searchsorted(sorted_sequence: Array, right: bool, side: str | None, sorter: Any) -> str:
    if sorter is not None:
        raise NotImplementedError("searchsorted with a sorter")
    side = side or ("right" if right else "left")
    return _search("sorted_sequence", sorted_sequence.rank, "self", side)


def bucketize(right: bool) -> str:
    return _search("boundaries", 1, "self", "right" if right else "left")


def nonzero_static(self: Array) -> str:
    expect_axes("nonzero_static", self)
    return "jnp.stack(jnp.nonzero(self, size=size, fill_value=fill_value), axis=-1)"


def histc(min: Any, max: Any) -> str:
    if min == max:
        raise NotImplementedError("histc between the smallest and the largest value")
    return "jnp.histogram(self, bins, (min, max))[0].astype(self.dtype)"


def isin(elements: str, among: str) -> Any:
    """Make the rule of an overload, whose arguments are named by what they are."""

    def rule(invert: bool) -> str:
        return call("jnp.isin", elements, among, invert=True if invert else None)

    return rule


INDEXING: dict[str, Rule] = {
    "aten.index.Tensor": index,
    "aten._unsafe_index.Tensor": index,
    "aten.index_put.default": index_put,
    "aten._unsafe_index_put.default": index_put,
    "aten.index_select.default": index_select,
    "aten.gather.default": gather,
    "aten.take.default": "self.ravel()[index]",
    "aten.take_along_dim.default": take_along_dim,
    "aten.index_add.default": index_add,
    "aten.index_copy.default": index_copy,
    "aten.index_fill.int_Scalar": index_fill,
    "aten.index_fill.int_Tensor": index_fill,
    "aten.put.default": put,
    "aten.slice_scatter.default": slice_scatter,
    "aten.select_scatter.default": select_scatter,
    "aten.diagonal_scatter.default": diagonal_scatter,
    "aten.copy.default": copy,
    "aten.fill.Scalar": fill,
    "aten.fill.Tensor": fill,
    "aten.masked_fill.Scalar": masked_fill,
    "aten.masked_fill.Tensor": masked_fill,
    "aten.masked_scatter.default": "masked_scatter(self, mask, source)",
    "aten.embedding.default": embedding,
    "aten.embedding_bag.padding_idx": embedding_bag,
    "aten.embedding_bag.default": embedding_bag,
    "aten._embedding_bag.default": embedding_bag,
    "aten._embedding_bag_forward_only.default": embedding_bag,
    "aten.one_hot.default": one_hot,
    "aten.topk.default": topk,
    "aten.sort.default": sort,
    "aten.sort.stable": sort,
    "aten.msort.default": "jnp.sort(self, axis=0)",
    "aten.argsort.default": argsort,
    "aten.argsort.stable": argsort,
    "aten.kthvalue.default": kthvalue,
    "aten.searchsorted.Tensor": searchsorted,
    "aten.searchsorted.Scalar": searchsorted,
    "aten.bucketize.Tensor": bucketize,
    "aten.bucketize.Scalar": bucketize,
    "aten.histc.default": histc,
    "aten.isin.Tensor_Tensor": isin("elements", "test_elements"),
    "aten.isin.Tensor_Scalar": isin("elements", "test_element"),
    "aten.isin.Scalar_Tensor": isin("element", "test_elements"),
    "aten.nonzero_static.default": nonzero_static,
    "aten.zero.default": "jnp.zeros_like(self)",
    **dict.fromkeys(
        (
            "aten._unique2.default",
            "aten.unique_consecutive.default",
            "aten.unique_dim.default",
            "aten.unique_dim_consecutive.default",
        ),
        refused("the number of distinct values is unknown before the call"),
    ),
    "aten.nonzero.default": refused("the number of elements that are not zero is unknown"),
    "aten.masked_select.default": refused(_SELECTS),
    "aten.bincount.default": refused("the length of bincount is the largest value"),
}
