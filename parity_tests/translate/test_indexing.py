"""Rules that read or write elements by their indices, beside torch's operators."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.beside_torch import assert_caught, check, compare, draws, row, with_varying

real, whole = draws(1)
tensor = torch.tensor
LAST = 2**63 - 1
LOWEST = torch.finfo(torch.float32).min

READS = [
    row("aten.index.Tensor", real(5, 7), [whole(5, 3)], text="x0[x1]"),
    row("aten.index.Tensor", real(5, 7, 3), [None, whole(7, 2, 3)], text="x0[:, x1]"),
    row("aten.index.Tensor", real(5, 7, 3), [whole(5, 4), None, whole(3, 4)]),
    row("aten.index.Tensor", real(5, 7, 3), [tensor(2), tensor([-1, 0])]),
    row("aten.index_select.default", real(5, 7), 0, tensor([1, 1, 4]), text="x0[x1]"),
    row("aten.index_select.default", real(5, 7, 3), -1, tensor([1, 1, 0]), text="x0[..., x1]"),
    row("aten.index_select.default", real(5, 7, 3), 1, tensor(2)),
    row("aten.gather.default", real(5, 7), 1, whole(7, 5, 3)),
    row("aten.gather.default", real(5, 7, 3), -1, whole(3, 2, 1, 11)),
    row("aten.gather.default", real(5), 0, whole(5, 2)),
    row("aten.take.default", real(5, 7), whole(35, 2, 3)),
    row("aten.take_along_dim.default", real(5, 7), whole(7, 1, 3), 1),
    row("aten.take_along_dim.default", real(5, 7), whole(35, 4)),
    row("aten.embedding.default", real(5, 7), whole(5, 2, 3), text="x0[x1]"),
    row("aten.embedding.default", real(5, 7), whole(5, 2, 9), 1, text="embedded(x0, x1, 1)"),
    row("aten.one_hot.default", whole(5, 2, 3), 5, text="jax.nn.one_hot(x0, 5, dtype=int)"),
    row(
        "aten.embedding_bag.padding_idx",
        *(real(5, 7), whole(5, 11), tensor([0, 3, 3, 7])),
        *(False, 1, False, None, False, 2),
        outputs=1,
    ),
    row(
        "aten.embedding_bag.padding_idx",
        *(real(5, 7), whole(5, 11), tensor([0, 3, 3, 7, 11])),
        *(False, 0, False, real(11), True, None),
        outputs=1,
    ),
]
TIES = whole(7, 5, 11)
TIES[0] = 2
WRITES = [
    row("aten.index_put.default", real(5, 7), [tensor([0, 3])], real(2, 7)),
    row(
        "aten.index_put.default",
        *(real(5, 7), [None, tensor([0, 3, 0])], real(5, 3), True),
        text="x0.at[:, x1].add(x2)",
    ),
    row(
        "aten.index_put.default",
        *(real(5, 7), [real(5) > 0], real(7)),
        text="jnp.where(x1[..., None], x2, x0)",
    ),
    row("aten.index_put.default", real(5, 7), [real(5, 7) > 0], tensor(2.0)),
    row("aten.index_put.default", real(5, 7), [real(5) > 0], real(1, 7), True),
    row("aten.index_put.default", real(5, 7, 3), [None, real(7) > 0], real(3)),
    row("aten.scatter.src", real(5, 7), 1, tensor([[0, 2], [3, 1], [6, 5]]), real(3, 2)),
    row(
        "aten.scatter.value",
        *(real(5, 7), 0, tensor([[0, 2], [3, 1], [4, 4]]), 2),
        text="x0.at[along(x1, axis=0)].set(2)",
    ),
    row("aten.scatter.value", whole(9, 5, 7) > 4, 0, tensor([[0, 2], [3, 1]]), 1),
    row("aten.scatter.value", real(5), 0, tensor([0, 2]), 2.0),
    row("aten.scatter_add.default", real(5, 7), 1, whole(7, 5, 11), real(5, 11)),
    *(
        row(
            "aten.scatter_reduce.two",
            *(real(5, 7).round(), 1, TIES, real(5, 11).round(), reduce),
            include_self=include,
        )
        for reduce in ("sum", "mean", "amax", "amin")
        for include in (True, False)
    ),
    row("aten.scatter_reduce.two", whole(9, 5, 7), 1, TIES, whole(9, 5, 11), "prod"),
    row("aten.index_add.default", real(5, 7), 1, tensor([3, 3, 0]), real(5, 3), alpha=2),
    row("aten.index_copy.default", real(5, 7), -1, tensor([3, 2, 0]), real(5, 3)),
    row("aten.index_fill.int_Scalar", real(5, 7), 0, tensor([3, 2, 0]), 3),
    row("aten.index_fill.int_Tensor", real(5, 7), 0, tensor([3, 2, 0]), real()),
    row("aten.put.default", real(5, 7), tensor([3, 2, 3]), real(3), True),
    row("aten.slice_scatter.default", real(5, 7, 3), real(5, 2, 3), 1, 2, 4),
    row("aten.slice_scatter.default", real(5, 7, 3), real(5, 7, 2), -1, 0, 9, 2),
    row("aten.slice_scatter.default", real(5, 7), real(5, 7), 0, 0, LAST, text="x1"),
    row("aten.slice_scatter.default", real(5, 7), real(2, 7), 0, -2, LAST),
    row("aten.select_scatter.default", real(5, 7, 3), real(5, 3), 1, -1),
    row("aten.diagonal_scatter.default", real(5, 7), real(4), -1),
    row("aten.diagonal_scatter.default", real(5, 7, 3), real(7, 3), 1, 2, 0),
    row("aten.diagonal_scatter.default", real(5, 7, 3), real(5, 3), 0, 1, 2),
    row("aten.copy.default", whole(3, 5, 7), real(5, 7) * 3, text="x1.astype(jnp.int32)"),
    row("aten.copy.default", whole(3, 5, 7), whole(3, 7)),
    row("aten.fill.Scalar", real(5, 7), 0, text="jnp.zeros_like(x0)"),
    row("aten.fill.Scalar", whole(3, 5, 7), 2.5),
    row("aten.fill.Tensor", real(5, 7), real()),
    row(
        "aten.masked_fill.Scalar",
        *(real(5, 7), real(7) > 0, -float("inf")),
        text="jnp.where(x1, -jnp.inf, x0)",
    ),
    row(
        "aten.masked_fill.Scalar",
        *(real(7), real(5, 7) > 0, LOWEST),
        text="jnp.where(x1, jnp.finfo(jnp.float32).min, x0)",
    ),
    row("aten.masked_fill.Scalar", whole(4, 7), real(5, 7) > 0, -100),
    row("aten.masked_fill.Tensor", real(7), real(5, 7) > 0, tensor(3)),
    row("aten.masked_scatter.default", real(5, 7), real(5, 1) > 0, real(5, 7)),
]
SORTS = [
    row("aten.topk.default", real(5, 7), 3, text="jax.lax.top_k(x0, 3)"),
    row("aten.topk.default", real(5, 7), 3, 0),
    row("aten.topk.default", real(5, 7), 3, -1, False, text="bottom_k(x0, 3)"),
    row("aten.sort.default", real(5, 7), text="jnp.sort(x0); jnp.argsort(x0)"),
    row("aten.sort.stable", whole(3, 29).float(), stable=True, descending=True),
    row("aten.sort.stable", whole(3, 5, 7).float(), stable=True, dim=0),
    row("aten.sort.default", tensor([2.0, float("nan"), -1.0]), -1, True),
    row("aten.argsort.stable", whole(3, 29), stable=True, descending=True),
    row("aten.msort.default", real(5, 7)),
    row(
        "aten.kthvalue.default",
        real(5, 7),
        3,
        0,
        text="jnp.sort(x0, axis=0)[2]; jnp.argsort(x0, axis=0)[2]",
    ),
    row("aten.kthvalue.default", real(5, 7), 3, -1, True),
    row("aten.searchsorted.Tensor", real(7).sort()[0], real(5, 3)),
    row("aten.searchsorted.Tensor", real(5, 7).sort()[0], real(5, 3), side="right"),
    row("aten.bucketize.Tensor", whole(7, 5, 3), tensor([1, 3, 3, 5]), right=True),
    row("aten.bucketize.Tensor", whole(7, 5, 3), tensor([1, 3, 3, 5])),
    row("aten.isin.Tensor_Tensor", whole(9, 5, 7), whole(9, 3), text="jnp.isin(x0, x1)"),
    row("aten.isin.Tensor_Scalar", whole(9, 5, 7), 3, invert=True),
    row("aten.nonzero_static.default", whole(2, 5, 7), size=40),
    row("aten.nonzero_static.default", whole(2, 5, 7), size=3),
    row("aten.histc.default", real(29), 5, -1, 1),
]


@pytest.mark.parametrize(("name", "args", "kwargs", "text"), [*READS, *WRITES, *SORTS])
def test_values_gradients_and_dtypes_are_those_of_torch(name, args, kwargs, text):
    check(name, args, kwargs, text)


@settings(max_examples=6, deadline=None)
@given(st.data())
def test_drawn_axes_and_sizes(data):
    """Elements along any axis, with fewer of them along the others."""
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    smaller = [data.draw(st.integers(1, size)) for size in shape]
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    smaller[axis] = data.draw(st.integers(1, 5))
    index = whole(shape[axis], *smaller)
    compare("aten.gather.default", real(*shape), axis, index)
    compare("aten.scatter_add.default", real(*shape), axis, index, real(*smaller))


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("aten.index_put.default", (real(5, 7), [real(5) > -9], real(5, 7))),
        ("aten.scatter_reduce.two", (real(5, 7), 1, TIES, real(5, 11), "prod")),
        ("aten.embedding.default", (real(5, 7), whole(5, 2), -1, True)),
        ("aten.one_hot.default", (whole(5, 2),)),
        ("aten.index.Tensor", (real(5, 7), [real(5) > 0])),
        ("aten.nonzero.default", (real(5),)),
        ("aten.masked_select.default", (real(5), real(5) > 0)),
        ("aten.bincount.default", (whole(5, 9),)),
        ("aten._unique2.default", (whole(5, 9),)),
    ],
)
def test_what_has_no_right_expression_is_refused(name, args):
    with pytest.raises(NotImplementedError):
        compare(name, *args)


@pytest.mark.parametrize(
    ("name", "args", "text"),
    [
        (
            "aten.slice_scatter.default",
            (real(2, 11), real(2, 4), 1, 7, 11),
            "self.at[:, 7:].set(src)",
        ),
        (
            "aten.slice_scatter.default",
            (real(2, 13), real(2, 9), 1, 2, 11),
            "self.at[:, 2:T].set(src)",
        ),
        ("aten.select_scatter.default", (real(2, 13), real(2), 1, 11), "self.at[:, T].set(src)"),
        (
            "aten.gather.default",
            (real(2, 3), 1, whole(3, 2, 11)),
            "jnp.take_along_axis(self, index, axis=1)",
        ),
        ("aten.topk.default", (real(2, 13), 11), "jax.lax.top_k(self, T)"),
        (
            "aten.kthvalue.default",
            (real(13), 11),
            "jnp.sort(self)[T - 1]; jnp.argsort(self)[T - 1]",
        ),
    ],
)
def test_sizes_that_vary_are_named(name, args, text):
    assert with_varying(11, name, *args) == text


@pytest.mark.parametrize(
    ("name", "wrong", "args"),
    [
        (
            "aten.index_put.default",
            "self.at[indices[0]].set(values)",
            (real(5), [tensor([1, 1])], real(2), True),
        ),
        ("aten.embedding.default", "weight[indices]", (real(5, 7), whole(5, 9), 1)),
        (
            "aten.gather.default",
            "jnp.take_along_axis(self, index, axis=0)",
            (real(5, 5), 1, whole(5, 5, 5)),
        ),
        ("aten.masked_fill.Scalar", "jnp.where(mask, self, value)", (real(5), real(5) > 0, 2.0)),
        (
            "aten.sort.stable",
            "jnp.sort(self)[::-1], jnp.argsort(self)[::-1]",
            (whole(3, 9).float(),),
        ),
        (
            "aten.bucketize.Tensor",
            "jnp.searchsorted(boundaries, self, side='right')",
            (whole(7, 9), tensor([1, 3])),
        ),
        (
            "aten.scatter_add.default",
            "self.at[along(index, axis=1)].set(src)",
            (real(2, 3), 1, whole(3, 2, 7), real(2, 7)),
        ),
        ("aten.copy.default", "src", (whole(5, 3), real(3))),
        ("aten.one_hot.default", "jax.nn.one_hot(self, num_classes)", (whole(5, 3), 5)),
    ],
)
def test_a_mistake_is_caught(name, wrong, args):
    more = {"stable": True, "descending": True} if name == "aten.sort.stable" else {}
    assert_caught(name, wrong, *args, **more)
