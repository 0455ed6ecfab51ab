"""Rules that read or write elements by their indices, beside torch's operators."""

import random

import pytest
import torch

from helpers.rules.rows import LAST, draws, row, table, written
from helpers.rules.varying import with_varying

real, whole = draws(1)
tensor = torch.tensor
LOWEST = torch.finfo(torch.float32).min

READS = [
    row("index.Tensor", real(5, 7), [whole(5, 3)], text="x0[x1]"),
    row("index.Tensor", real(5, 7, 3), [None, whole(7, 2, 3)], text="x0[:, x1]"),
    row("index.Tensor", real(5, 7, 3), [whole(5, 4), None, whole(3, 4)]),
    row("index.Tensor", real(5, 7, 3), [tensor(2), tensor([-1, 0])]),
    row("index_select.default", real(5, 7), 0, tensor([1, 1, 4]), text="x0[x1]"),
    row("index_select.default", real(5, 7, 3), -1, tensor([1, 1, 0]), text="x0[..., x1]"),
    row("index_select.default", real(5, 7, 3), 1, tensor(2)),
    row("gather.default", real(5, 7), 1, whole(7, 5, 3)),
    row("gather.default", real(5, 7, 3), -1, whole(3, 2, 1, 11)),
    row("gather.default", real(5), 0, whole(5, 2)),
    row("take.default", real(5, 7), whole(35, 2, 3)),
    row("take_along_dim.default", real(5, 7), whole(7, 1, 3), 1),
    row("take_along_dim.default", real(5, 7), whole(35, 4)),
    row("embedding.default", real(5, 7), whole(5, 2, 3), text="x0[x1]"),
    row("embedding.default", real(5, 7), whole(5, 2, 9), 1, text="embedded(x0, x1, 1)"),
    row("one_hot.default", whole(5, 2, 3), 5, text="jax.nn.one_hot(x0, 5, dtype=int)"),
    row(
        "embedding_bag.padding_idx",
        *(real(5, 7), whole(5, 11), tensor([0, 3, 3, 7])),
        *(False, 1, False, None, False, 2),
        outputs=1,
    ),
    row(
        "embedding_bag.padding_idx",
        *(real(5, 7), whole(5, 11), tensor([0, 3, 3, 7, 11])),
        *(False, 0, False, real(11), True, None),
        outputs=1,
    ),
]
TIES = whole(7, 5, 11)
TIES[0] = 2
WRITES = [
    row("index_put.default", real(5, 7), [tensor([0, 3])], real(2, 7)),
    row(
        "index_put.default",
        *(real(5, 7), [None, tensor([0, 3, 0])], real(5, 3), True),
        text="x0.at[:, x1].add(x2)",
    ),
    row(
        "index_put.default",
        *(real(5, 7), [real(5) > 0], real(7)),
        text="jnp.where(x1[..., None], x2, x0)",
    ),
    row("index_put.default", real(5, 7), [real(5, 7) > 0], tensor(2.0)),
    row("index_put.default", real(5, 7), [real(5) > 0], real(1, 7), True),
    row("index_put.default", real(5, 7, 3), [None, real(7) > 0], real(3)),
    row("scatter.src", real(5, 7), 1, tensor([[0, 2], [3, 1], [6, 5]]), real(3, 2)),
    row(
        "scatter.value",
        *(real(5, 7), 0, tensor([[0, 2], [3, 1], [4, 4]]), 2),
        text="x0.at[along(x1, axis=0)].set(2)",
    ),
    row("scatter.value", whole(9, 5, 7) > 4, 0, tensor([[0, 2], [3, 1]]), 1),
    row("scatter.value", real(5), 0, tensor([0, 2]), 2.0),
    row("scatter_add.default", real(5, 7), 1, whole(7, 5, 11), real(5, 11)),
    *(
        row(
            "scatter_reduce.two",
            *(real(5, 7).round(), 1, TIES, real(5, 11).round(), reduce),
            include_self=include,
        )
        for reduce in ("sum", "mean", "amax", "amin")
        for include in (True, False)
    ),
    row("scatter_reduce.two", whole(9, 5, 7), 1, TIES, whole(9, 5, 11), "prod"),
    row("index_add.default", real(5, 7), 1, tensor([3, 3, 0]), real(5, 3), alpha=2),
    row("index_copy.default", real(5, 7), -1, tensor([3, 2, 0]), real(5, 3)),
    row("index_fill.int_Scalar", real(5, 7), 0, tensor([3, 2, 0]), 3),
    row("index_fill.int_Tensor", real(5, 7), 0, tensor([3, 2, 0]), real()),
    row("put.default", real(5, 7), tensor([3, 2, 3]), real(3), True),
    row("slice_scatter.default", real(5, 7, 3), real(5, 2, 3), 1, 2, 4),
    row("slice_scatter.default", real(5, 7, 3), real(5, 7, 2), -1, 0, 9, 2),
    row("slice_scatter.default", real(5, 7), real(5, 7), 0, 0, LAST, text="x1"),
    row("slice_scatter.default", real(5, 7), real(2, 7), 0, -2, LAST),
    row("select_scatter.default", real(5, 7, 3), real(5, 3), 1, -1),
    row("diagonal_scatter.default", real(5, 7), real(4), -1),
    row("diagonal_scatter.default", real(5, 7, 3), real(7, 3), 1, 2, 0),
    row("diagonal_scatter.default", real(5, 7, 3), real(5, 3), 0, 1, 2),
    row("copy.default", whole(3, 5, 7), real(5, 7) * 3, text="x1.astype(jnp.int32)"),
    row("copy.default", whole(3, 5, 7), whole(3, 7)),
    row("fill.Scalar", real(5, 7), 0, text="jnp.zeros_like(x0)"),
    row("fill.Scalar", whole(3, 5, 7), 2.5),
    row("fill.Tensor", real(5, 7), real()),
    row(
        "masked_fill.Scalar",
        *(real(5, 7), real(7) > 0, -float("inf")),
        text="jnp.where(x1, -jnp.inf, x0)",
    ),
    row(
        "masked_fill.Scalar",
        *(real(7), real(5, 7) > 0, LOWEST),
        text="jnp.where(x1, jnp.finfo(jnp.float32).min, x0)",
    ),
    row("masked_fill.Scalar", whole(4, 7), real(5, 7) > 0, -100),
    row("masked_fill.Tensor", real(7), real(5, 7) > 0, tensor(3)),
    row("masked_scatter.default", real(5, 7), real(5, 1) > 0, real(5, 7)),
]
SORTS = [
    row("topk.default", real(5, 7), 3, text="jax.lax.top_k(x0, 3)"),
    row("topk.default", real(5, 7), 3, 0),
    row("topk.default", real(5, 7), 3, -1, False, text="bottom_k(x0, 3)"),
    row("sort.default", real(5, 7), text="jnp.sort(x0); jnp.argsort(x0)"),
    row("sort.stable", whole(3, 29).float(), stable=True, descending=True),
    row("sort.stable", whole(3, 5, 7).float(), stable=True, dim=0),
    row("sort.default", tensor([2.0, float("nan"), -1.0]), -1, True),
    row("argsort.stable", whole(3, 29), stable=True, descending=True),
    row("msort.default", real(5, 7)),
    row(
        "kthvalue.default",
        real(5, 7),
        3,
        0,
        text="jnp.sort(x0, axis=0)[2]; jnp.argsort(x0, axis=0)[2]",
    ),
    row("kthvalue.default", real(5, 7), 3, -1, True),
    row("searchsorted.Tensor", real(7).sort()[0], real(5, 3)),
    row("searchsorted.Tensor", real(5, 7).sort()[0], real(5, 3), side="right"),
    row("bucketize.Tensor", whole(7, 5, 3), tensor([1, 3, 3, 5]), right=True),
    row("bucketize.Tensor", whole(7, 5, 3), tensor([1, 3, 3, 5])),
    row("isin.Tensor_Tensor", whole(9, 5, 7), whole(9, 3), text="jnp.isin(x0, x1)"),
    row("isin.Tensor_Scalar", whole(9, 5, 7), 3, invert=True),
    row("nonzero_static.default", whole(2, 5, 7), size=40),
    row("nonzero_static.default", whole(2, 5, 7), size=3),
    row("histc.default", real(29), 5, -1, 1),
]


def drawn():
    """Elements along any axis, with fewer of them along the others."""
    rng = random.Random(1)
    for _ in range(8):
        shape = [rng.randint(1, 4) for _ in range(rng.randint(1, 3))]
        smaller = [rng.randint(1, size) for size in shape]
        axis = rng.randrange(-len(shape), len(shape))
        smaller[axis] = rng.randint(1, 5)
        index = whole(shape[axis], *smaller)
        yield row("gather.default", real(*shape), axis, index)
        yield row("scatter_add.default", real(*shape), axis, index, real(*smaller))


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("index_put.default", (real(5, 7), [real(5) > -9], real(5, 7))),
        ("scatter_reduce.two", (real(5, 7), 1, TIES, real(5, 11), "prod")),
        ("embedding.default", (real(5, 7), whole(5, 2), -1, True)),
        ("one_hot.default", (whole(5, 2),)),
        ("index.Tensor", (real(5, 7), [real(5) > 0])),
        ("nonzero.default", (real(5),)),
        ("masked_select.default", (real(5), real(5) > 0)),
        ("bincount.default", (whole(5, 9),)),
        ("_unique2.default", (whole(5, 9),)),
    ],
)
def test_what_has_no_right_expression_is_refused(name, args):
    with pytest.raises(NotImplementedError):
        written(name, *args)


@pytest.mark.parametrize(
    ("name", "args", "text"),
    [
        (
            "slice_scatter.default",
            (real(2, 11), real(2, 4), 1, 7, 11),
            "self.at[:, 7:].set(src)",
        ),
        (
            "slice_scatter.default",
            (real(2, 13), real(2, 9), 1, 2, 11),
            "self.at[:, 2:T].set(src)",
        ),
        ("select_scatter.default", (real(2, 13), real(2), 1, 11), "self.at[:, T].set(src)"),
        (
            "gather.default",
            (real(2, 3), 1, whole(3, 2, 11)),
            "jnp.take_along_axis(self, index, axis=1)",
        ),
        ("topk.default", (real(2, 13), 11), "jax.lax.top_k(self, T)"),
        (
            "kthvalue.default",
            (real(13), 11),
            "jnp.sort(self)[T - 1]; jnp.argsort(self)[T - 1]",
        ),
    ],
)
def test_sizes_that_vary_are_named(name, args, text):
    assert with_varying(name, *args) == text


MISTAKES = [
    row(
        "index_put.default",
        real(5),
        [tensor([1, 1])],
        real(2),
        True,
        wrong="self.at[indices[0]].set(values)",
    ),
    row("embedding.default", real(5, 7), whole(5, 9), 1, wrong="weight[indices]"),
    row(
        "gather.default",
        real(5, 5),
        1,
        whole(5, 5, 5),
        wrong="jnp.take_along_axis(self, index, axis=0)",
    ),
    row("masked_fill.Scalar", real(5), real(5) > 0, 2.0, wrong="jnp.where(mask, self, value)"),
    row(
        "sort.stable",
        whole(3, 9).float(),
        wrong="jnp.sort(self)[::-1], jnp.argsort(self)[::-1]",
        stable=True,
        descending=True,
    ),
    row(
        "bucketize.Tensor",
        whole(7, 9),
        tensor([1, 3]),
        wrong="jnp.searchsorted(boundaries, self, side='right')",
    ),
    row(
        "scatter_add.default",
        real(2, 3),
        1,
        whole(3, 2, 7),
        real(2, 7),
        wrong="self.at[along(index, axis=1)].set(src)",
    ),
    row("copy.default", whole(5, 3), real(3), wrong="src"),
    row("one_hot.default", whole(5, 3), 5, wrong="jax.nn.one_hot(self, num_classes)"),
]


@table(READS, WRITES, SORTS, drawn(), MISTAKES)
def test_values_gradients_and_dtypes_are_those_of_torch(row):
    row.check()


def test_indices_of_a_tensor_without_axes_are_refused():
    with pytest.raises(NotImplementedError):
        written("nonzero_static.default", real(), size=1)
