"""Rules of operators that place elements anew."""

import random

import pytest
import torch
from torch import tensor

from helpers.rules.rows import BOOLS, BTD, COMPLEX, INTS, SCALAR, F, G, row, table
from helpers.rules.varying import with_varying

IMAGE = torch.arange(96.0).reshape(2, 8, 2, 3)

ROWS = [
    row("view.default", BTD, [2, -1]),
    row("view.default", SCALAR, [1, 1]),
    row("view.default", F[:1, :1], []),
    row("expand.default", F, [2, 3]),
    row("expand.default", F, [4, -1, 3]),
    row("expand.default", F[:1], [4, -1]),
    row("permute.default", BTD, [0, 2, 1]),
    row("permute.default", BTD, [2, 0, 1]),
    row("permute.default", BTD, [0, 1, 2]),
    row("permute.default", F, [1, 0]),
    row("transpose.int", BTD, 1, 2),
    row("transpose.int", BTD, -1, -2),
    row("t.default", F),
    row("unsqueeze.default", BTD, 0),
    row("unsqueeze.default", BTD, 1),
    row("unsqueeze.default", BTD, 2),
    row("unsqueeze.default", BTD, 3),
    row("unsqueeze.default", BTD, -1),
    row("unsqueeze.default", BTD, -2),
    row("unsqueeze.default", BTD, -4),
    row("unsqueeze.default", SCALAR, 0),
    row("squeeze.dim", F[:1], 0),
    row("squeeze.dim", F, 0),
    row("squeeze.default", F[:1, :1]),
    row("squeeze.dims", BTD[:1, :, :1], [0, 2]),
    row("select.int", BTD, 0, 1),
    row("select.int", BTD, 1, -1),
    row("select.int", BTD, -1, 2),
    row("select.int", BTD, 2, 0),
    row("slice.Tensor", BTD, 1, 1, 9223372036854775807),
    row("slice.Tensor", BTD, 2, 0, -1, 2),
    row("slice.Tensor", BTD, 0),
    row("slice.Tensor", BTD, -1, -3, -1),
    row("split.Tensor", BTD, 2, -1),
    row("split.Tensor", BTD, 1, 1),
    row("split_with_sizes.default", BTD, [1, 4], 2),
    row("chunk.default", BTD, 2, -1),
    row("unbind.int", BTD, -1),
    row("unbind.int", BTD),
    row("cat.default", [F, G], -1),
    row("cat.default", [F, INTS]),
    row("cat.default", [torch.zeros(0), BTD], -1),
    row("stack.default", [F, G]),
    row("stack.default", [F, G], -1),
    row("flip.default", BTD, [1]),
    row("flip.default", BTD, [0, -1]),
    row("repeat.default", F, [2, 1, 2]),
    row("tril.default", F, -1),
    row("triu.default", BOOLS),
    row("detach.default", F),
    row("clone.default", F),
    row("flatten.using_ints", BTD, 1),
    row("flatten.using_ints", BTD, 0, 1),
    row("flatten.using_ints", SCALAR),
    row("unflatten.int", BTD[:, :2], 1, [1, 2]),
    row("ravel.default", BTD),
    row("swapaxes.default", BTD, 0, 1),
    row("movedim.int", BTD, 0, -1),
    row("movedim.intlist", BTD, [0, 1], [1, 2]),
    row("narrow.default", BTD, 1, 0, 2),
    row("narrow.default", BTD, 2, -2, 2),
    row("narrow.default", BTD, 1, 0, 0),
    row("reshape.default", BTD, [6, -1]),
    row("view_as.default", BTD, BTD.reshape(6, 5)),
    row("expand_as.default", F, BTD[0].T[:2].expand(4, 2, 3)),
    row("mT.default", BTD),
    row("adjoint.default", COMPLEX),
    row("split.sizes", BTD, [1, 4], 2),
    row("tensor_split.sections", BTD, 2, 2),
    row("tensor_split.indices", BTD, [1, 3], 2),
    row("hstack.default", [F, G]),
    row("vstack.default", [F[0], G[0]]),
    row("dstack.default", [F, G]),
    row("column_stack.default", [F[:, 0], G]),
    row("block_diag.default", [F, G]),
    row("fliplr.default", F),
    row("rot90.default", F),
    row("rot90.default", BTD, 2, [1, 2]),
    row("roll.default", BTD, [2], [1]),
    row("roll.default", BTD, [1, -2], [0, 2]),
    row("roll.default", F, [2]),
    row("diagonal.default", BTD),
    row("diagonal.default", BTD, 1, 1, 2),
    row("diagonal.default", BTD, -1, -2, -1),
    row("diag.default", F[0], 1),
    row("diag.default", F),
    row("diag_embed.default", F),
    row("diag_embed.default", F, 1),
    row("diag_embed.default", F, -2, 0, 2),
    row("repeat_interleave.self_int", F, 2, 1),
    row("repeat_interleave.self_int", F, 2),
    row("repeat_interleave.self_Tensor", F, tensor([1, 3]), 0),
    row("meshgrid.default", [F[0], G[1]]),
    row("meshgrid.indexing", [F[0], G[1, :2]], indexing="xy"),
    row("broadcast_tensors.default", [F, G[:1], SCALAR]),
    row("diff.default", BTD),
    row("diff.default", BTD, 2, 1),
    row("diff.default", F, 1, -1, F[:, :1].contiguous(), None),
    row("diff.default", BOOLS),
    row("pixel_shuffle.default", IMAGE, 2),
    row("channel_shuffle.default", IMAGE, 4),
    row("atleast_1d.default", SCALAR),
    row("atleast_2d.default", F[0]),
    row("atleast_3d.default", F),
    row("atleast_2d.Sequence", [F[0], SCALAR]),
    row("unfold.default", BTD, 2, 2, 1),
    row("unfold.default", BTD, 1, 2, 1),
    row("unfold.default", BTD, -1, 3, 2),
    row("unfold_copy.default", BTD, 0, 1, 1),
    row("slice_copy.Tensor", BTD, 1, 1, 2),
    row("tile.default", F, [2]),
    row("repeat.default", SCALAR, [2]),
    row("unsafe_split.Tensor", BTD, 2, 2),
    row("triu.default", BTD, 1),
    row("tril.default", BOOLS),
    row("pixel_unshuffle.default", IMAGE[:, :, :2, :2].contiguous(), 2),
]

TEXTS = [
    row("view.default", BTD, [2, -1], text="x0.reshape(2, -1)"),
    row("permute.default", BTD, [0, 2, 1], text="x0.swapaxes(1, 2)"),
    row("permute.default", BTD, [2, 0, 1], text="x0.transpose(2, 0, 1)"),
    row("transpose.int", BTD, -1, -2, text="x0.swapaxes(-1, -2)"),
    row("t.default", F, text="x0.T"),
    row("unsqueeze.default", BTD, 1, text="x0[:, None]"),
    row("unsqueeze.default", BTD, -1, text="x0[..., None]"),
    row("select.int", BTD, 1, 0, text="x0[:, 0]"),
    row("slice.Tensor", BTD, 2, 1, 2**63 - 1, text="x0[..., 1:]"),
    row("slice.Tensor", BTD, 1, 0, 2, text="x0[:, :2]"),
    row("slice.Tensor", BTD, 0, 0, 2**63 - 1, text="x0"),
    row("expand.default", F, [2, -1], text="x0"),
    row("split.Tensor", BTD, 1, 1, text="jnp.split(x0, 3, axis=1)"),
    row("split_with_sizes.default", BTD, [1, 4], -1, text="jnp.split(x0, [1], axis=-1)"),
    row("cat.default", [F, G], -1, text="jnp.concatenate([x0, x1], axis=-1)"),
    row("repeat.default", F, [2, 1], text="jnp.tile(x0, (2, 1))"),
    row("flatten.using_ints", BTD, 1, text="x0.reshape(2, -1)"),
    row("detach.default", F, text="jax.lax.stop_gradient(x0)"),
    row("clone.default", F, text="x0"),
]

MISTAKES = [
    row("detach.default", F, wrong="self"),
    row("permute.default", BTD, [2, 0, 1], wrong="self.transpose(1, 2, 0)"),
    row("slice.Tensor", BTD, 1, -2, 3, wrong="self[:, :2]"),
    row("split.Tensor", BTD, 4, -1, wrong="jnp.array_split(self, 2, axis=-1)"),
    row("cat.default", [F, F], 1, wrong="jnp.concatenate(tensors)"),
    row("repeat.default", F, [2, 2], wrong="jnp.repeat(self, 2)"),
    row("roll.default", BTD, [2], [1], wrong="jnp.roll(self, -2, 1)"),
    row("diag_embed.default", F, 1, wrong="diagonal_matrix(self, -1)"),
    row("pixel_shuffle.default", IMAGE, 2, wrong="pixel_unshuffle(self, 1).reshape(2, 2, 4, 6)"),
    row("triu.default", BTD, 1, wrong="jnp.triu(self)"),
]


def drawn():
    """Axes counted from either end, and parts of any size."""
    rng = random.Random(1)
    for _ in range(4):
        shape = [rng.randint(1, 3) for _ in range(rng.randint(1, 4))]
        values = torch.arange(1.0, 1.0 + torch.Size(shape).numel()).reshape(shape)
        rank = len(shape)

        def axis(rank=rank):
            return rng.randrange(-rank, rank)

        dim = axis()
        yield row("unsqueeze.default", values, rng.randrange(-rank - 1, rank + 1))
        yield row("squeeze.dim", values, dim)
        yield row("transpose.int", values, dim, axis())
        yield row("permute.default", values, rng.sample(range(rank), rank))
        yield row("select.int", values, dim, rng.randrange(-shape[dim], shape[dim]))
        yield row("slice.Tensor", values, dim, axis(), rng.randint(-4, 4), rng.randint(1, 3))
        yield row("split.Tensor", values, rng.randint(1, 4), dim)
        yield row("chunk.default", values, rng.randint(1, 4), dim)
        yield row("flip.default", values, [dim])
        yield row("flatten.using_ints", values, dim % rank, -1)


@table(ROWS, TEXTS, drawn(), MISTAKES)
def test_values_gradients_and_dtypes_are_those_of_torch(row):
    row.check()


B, T = {2: "B"}, {7: "T"}


@pytest.mark.parametrize(
    ("name", "args", "sizes", "expected"),
    [
        (
            "view.default",
            (torch.ones(2, 7, 12), [2, 7, 3, 4]),
            B | T,
            "self.reshape(B, T, 3, 4)",
        ),
        (
            "expand.default",
            (torch.ones(2, 1, 7), [-1, 5, 7]),
            B | T,
            "jnp.broadcast_to(self, (self.shape[0], 5, T))",
        ),
        ("expand.default", (torch.ones(2, 7), [2, -1]), B | T, "self"),
        (
            "flatten.using_ints",
            (torch.ones(2, 3, 7), 1),
            B | T | {21: "3 * T"},
            "self.reshape(self.shape[0], -1)",
        ),
        ("slice.Tensor", (torch.ones(2, 64), 1, 0, 7), B | T, "self[:, :T]"),
        (
            "split_with_sizes.default",
            (torch.ones(2, 7), [3, 4], 1),
            B | T | {3: "S", 4: "T - S"},
            "jnp.split(self, [S], axis=1)",
        ),
        ("squeeze.default", (torch.ones(7, 1, 1),), T, "self.squeeze((1, 2))"),
    ],
)
def test_sizes_that_vary_are_named(name, args, sizes, expected):
    assert with_varying(name, *args, sizes=sizes) == expected


@pytest.mark.parametrize(
    ("name", "args", "sizes"),
    [
        ("chunk.default", (torch.ones(7), 2), T | {4: "(T + 1) // 2", 3: "T // 2"}),
        ("repeat_interleave.self_Tensor", (torch.ones(7), torch.ones(7).int(), 0), {7: "T"}),
    ],
)
def test_a_size_that_only_the_call_tells_is_refused(name, args, sizes):
    with pytest.raises(NotImplementedError):
        with_varying(name, *args, sizes=sizes)
