"""Rules of operators that place elements anew."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import tensor

from helpers.rule_comparison import differences
from helpers.rule_rows import BOOLS, BTD, INTS, SCALAR, F, G, call, named, paired, text, written
from jax_attn.translate.rules.rule import Array, VaryingSize
from jax_attn.translate.rules.table import RULES

COMPLEX = torch.complex(F, G)
IMAGE = torch.arange(96.0).reshape(2, 8, 2, 3)

ROWS = [
    ("view.default", BTD, [2, -1]),
    ("view.default", SCALAR, [1, 1]),
    ("view.default", F[:1, :1], []),
    ("expand.default", F, [2, 3]),
    ("expand.default", F, [4, -1, 3]),
    ("expand.default", F[:1], [4, -1]),
    ("permute.default", BTD, [0, 2, 1]),
    ("permute.default", BTD, [2, 0, 1]),
    ("permute.default", BTD, [0, 1, 2]),
    ("permute.default", F, [1, 0]),
    ("transpose.int", BTD, 1, 2),
    ("transpose.int", BTD, -1, -2),
    ("t.default", F),
    ("unsqueeze.default", BTD, 0),
    ("unsqueeze.default", BTD, 1),
    ("unsqueeze.default", BTD, 2),
    ("unsqueeze.default", BTD, 3),
    ("unsqueeze.default", BTD, -1),
    ("unsqueeze.default", BTD, -2),
    ("unsqueeze.default", BTD, -4),
    ("unsqueeze.default", SCALAR, 0),
    ("squeeze.dim", F[:1], 0),
    ("squeeze.dim", F, 0),
    ("squeeze.default", F[:1, :1]),
    ("squeeze.dims", BTD[:1, :, :1], [0, 2]),
    ("select.int", BTD, 0, 1),
    ("select.int", BTD, 1, -1),
    ("select.int", BTD, -1, 2),
    ("select.int", BTD, 2, 0),
    ("slice.Tensor", BTD, 1, 1, 9223372036854775807),
    ("slice.Tensor", BTD, 2, 0, -1, 2),
    ("slice.Tensor", BTD, 0),
    ("slice.Tensor", BTD, -1, -3, -1),
    ("split.Tensor", BTD, 2, -1),
    ("split.Tensor", BTD, 1, 1),
    ("split_with_sizes.default", BTD, [1, 4], 2),
    ("chunk.default", BTD, 2, -1),
    ("unbind.int", BTD, -1),
    ("unbind.int", BTD),
    ("cat.default", [F, G], -1),
    ("cat.default", [F, INTS]),
    ("cat.default", [torch.zeros(0), BTD], -1),
    ("stack.default", [F, G]),
    ("stack.default", [F, G], -1),
    ("flip.default", BTD, [1]),
    ("flip.default", BTD, [0, -1]),
    ("repeat.default", F, [2, 1, 2]),
    ("tril.default", F, -1),
    ("triu.default", BOOLS),
    ("detach.default", F),
    ("clone.default", F),
    ("flatten.using_ints", BTD, 1),
    ("flatten.using_ints", BTD, 0, 1),
    ("flatten.using_ints", SCALAR),
    ("unflatten.int", BTD[:, :2], 1, [1, 2]),
    ("ravel.default", BTD),
    ("swapaxes.default", BTD, 0, 1),
    ("movedim.int", BTD, 0, -1),
    ("movedim.intlist", BTD, [0, 1], [1, 2]),
    ("narrow.default", BTD, 1, 0, 2),
    ("narrow.default", BTD, 2, -2, 2),
    ("view_as.default", BTD, BTD.reshape(6, 5)),
    ("expand_as.default", F, BTD[0].T[:2].expand(4, 2, 3)),
    ("mT.default", BTD),
    ("adjoint.default", torch.complex(F, G)),
    ("split.sizes", BTD, [1, 4], 2),
    ("tensor_split.sections", BTD, 2, 2),
    ("tensor_split.indices", BTD, [1, 3], 2),
    ("hstack.default", [F, G]),
    ("vstack.default", [F[0], G[0]]),
    ("dstack.default", [F, G]),
    ("column_stack.default", [F[:, 0], G]),
    ("block_diag.default", [F, G]),
    ("fliplr.default", F),
    ("rot90.default", F),
    ("rot90.default", BTD, 2, [1, 2]),
    ("roll.default", BTD, [2], [1]),
    ("roll.default", BTD, [1, -2], [0, 2]),
    ("roll.default", F, [2]),
    ("diagonal.default", BTD),
    ("diagonal.default", BTD, 1, 1, 2),
    ("diagonal.default", BTD, -1, -2, -1),
    ("diag.default", F[0], 1),
    ("diag.default", F),
    ("diag_embed.default", F),
    ("diag_embed.default", F, 1),
    ("diag_embed.default", F, -2, 0, 2),
    ("repeat_interleave.self_int", F, 2, 1),
    ("repeat_interleave.self_int", F, 2),
    ("repeat_interleave.self_Tensor", F, tensor([1, 3]), 0),
    ("meshgrid.default", [F[0], G[1]]),
    ("meshgrid.indexing", [F[0], G[1, :2]], {"indexing": "xy"}),
    ("broadcast_tensors.default", [F, G[:1], SCALAR]),
    ("diff.default", BTD),
    ("diff.default", BTD, 2, 1),
    ("diff.default", F, 1, -1, F[:, :1].contiguous(), None),
    ("diff.default", BOOLS),
    ("pixel_shuffle.default", IMAGE, 2),
    ("channel_shuffle.default", IMAGE, 4),
    ("atleast_1d.default", SCALAR),
    ("atleast_2d.default", F[0]),
    ("atleast_3d.default", F),
    ("atleast_2d.Sequence", [F[0], SCALAR]),
    ("unfold.default", BTD, 2, 2, 1),
    ("unfold.default", BTD, 1, 2, 1),
    ("unfold.default", BTD, -1, 3, 2),
    ("unfold_copy.default", BTD, 0, 1, 1),
    ("slice_copy.Tensor", BTD, 1, 1, 2),
    ("tile.default", F, [2]),
    ("repeat.default", SCALAR, [2]),
    ("unsafe_split.Tensor", BTD, 2, 2),
    ("triu.default", BTD, 1),
    ("tril.default", BOOLS),
    ("pixel_unshuffle.default", IMAGE[:, :, :2, :2].contiguous(), 2),
]

TEXTS = [
    (("view.default", BTD, [2, -1]), "x0.reshape(2, -1)"),
    (("permute.default", BTD, [0, 2, 1]), "x0.swapaxes(1, 2)"),
    (("permute.default", BTD, [2, 0, 1]), "x0.transpose(2, 0, 1)"),
    (("transpose.int", BTD, -1, -2), "x0.swapaxes(-1, -2)"),
    (("t.default", F), "x0.T"),
    (("unsqueeze.default", BTD, 1), "x0[:, None]"),
    (("unsqueeze.default", BTD, -1), "x0[..., None]"),
    (("select.int", BTD, 1, 0), "x0[:, 0]"),
    (("slice.Tensor", BTD, 2, 1, 2**63 - 1), "x0[..., 1:]"),
    (("slice.Tensor", BTD, 1, 0, 2), "x0[:, :2]"),
    (("slice.Tensor", BTD, 0, 0, 2**63 - 1), "x0"),
    (("expand.default", F, [2, -1]), "x0"),
    (("split.Tensor", BTD, 1, 1), "jnp.split(x0, 3, axis=1)"),
    (("split_with_sizes.default", BTD, [1, 4], -1), "jnp.split(x0, [1], axis=-1)"),
    (("cat.default", [F, G], -1), "jnp.concatenate([x0, x1], axis=-1)"),
    (("repeat.default", F, [2, 1]), "jnp.tile(x0, (2, 1))"),
    (("flatten.using_ints", BTD, 1), "x0.reshape(2, -1)"),
    (("detach.default", F), "jax.lax.stop_gradient(x0)"),
    (("clone.default", F), "x0"),
]

PLANTED = [
    (("detach.default", F), "self"),
    (("permute.default", BTD, [2, 0, 1]), "self.transpose(1, 2, 0)"),
    (("slice.Tensor", BTD, 1, -2, 3), "self[:, :2]"),
    (("split.Tensor", BTD, 4, -1), "jnp.array_split(self, 2, axis=-1)"),
    (("cat.default", [F, F], 1), "jnp.concatenate(tensors)"),
    (("repeat.default", F, [2, 2]), "jnp.repeat(self, 2)"),
    (("roll.default", BTD, [2], [1]), "jnp.roll(self, -2, 1)"),
    (("diag_embed.default", F, 1), "diagonal_matrix(self, -1)"),
    (("pixel_shuffle.default", IMAGE, 2), "pixel_unshuffle(self, 1).reshape(2, 2, 4, 6)"),
    (("triu.default", BTD, 1), "jnp.triu(self)"),
]


@pytest.mark.parametrize(("name", "args", "kwargs"), named(ROWS))
def test_a_rule_equals_torch(name, args, kwargs):
    assert differences(name, *args, **kwargs) == []


@pytest.mark.parametrize(("row", "expected"), paired(TEXTS))
def test_the_text_is_what_a_person_would_write(row, expected):
    assert text(row) == expected


@pytest.mark.parametrize(("row", "wrong"), paired(PLANTED))
def test_a_wrong_rule_is_noticed(row, wrong, monkeypatch):
    name, args, kwargs = call(row)
    monkeypatch.setitem(RULES, name, wrong)
    assert differences(name, *args, **kwargs)


B, T = VaryingSize(2), VaryingSize(7)


@pytest.mark.parametrize(
    ("name", "shape", "arguments", "out", "expected"),
    [
        ("view.default", (B, T, 12), {"size": [B, T, 3, 4]}, (B, T, 3, 4), "x.reshape(B, T, 3, 4)"),
        (
            "expand.default",
            (B, 1, T),
            {"size": [-1, 5, T]},
            (B, 5, T),
            "jnp.broadcast_to(x, (x.shape[0], 5, T))",
        ),
        ("expand.default", (B, T), {"size": [B, -1]}, (B, T), "x"),
        (
            "flatten.using_ints",
            (B, 3, T),
            {"start_dim": 1, "end_dim": -1},
            (B, VaryingSize(21)),
            "x.reshape(x.shape[0], -1)",
        ),
        ("slice.Tensor", (B, 64), {"dim": 1, "start": 0, "end": T, "step": 1}, (B, T), "x[:, :T]"),
        (
            "split_with_sizes.default",
            (B, T),
            {"split_sizes": [VaryingSize(3), VaryingSize(4)], "dim": 1},
            [(B, VaryingSize(3)), (B, VaryingSize(4))],
            "jnp.split(x, [S], axis=1)",
        ),
        ("squeeze.default", (B, 1, 1), {}, (B,), "x.squeeze((1, 2))"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_a_size_that_varies_is_named(name, shape, arguments, out, expected):
    names = {2: "B", 7: "T", 3: "S", 4: "T - S"}
    assert written(name, shape, arguments, out, names) == expected


@pytest.mark.parametrize(
    ("name", "shape", "arguments", "out"),
    [
        ("chunk.default", (T,), {"chunks": 2, "dim": 0}, [(VaryingSize(4),), (VaryingSize(3),)]),
        (
            "repeat_interleave.self_Tensor",
            (T,),
            {"repeats": Array((T,), "int32"), "dim": 0},
            (VaryingSize(9),),
        ),
    ],
)
def test_a_size_that_only_the_call_tells_is_refused(name, shape, arguments, out):
    with pytest.raises(NotImplementedError):
        written(name, shape, arguments, out, {})


@settings(max_examples=12, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from([1, 2, 3]), min_size=1, max_size=4), st.data())
def test_any_axis(shape, data):
    values = torch.arange(1.0, 1.0 + torch.Size(shape).numel()).reshape(shape)
    rank = len(shape)
    axis = st.integers(-rank, rank - 1)
    dim = data.draw(axis)
    length = shape[dim]
    bound = st.integers(-4, 4)
    row = data.draw(
        st.one_of(
            st.tuples(st.just("unsqueeze.default"), st.integers(-rank - 1, rank)),
            st.tuples(st.just("squeeze.dim"), axis),
            st.tuples(st.just("transpose.int"), axis, axis),
            st.tuples(st.just("permute.default"), st.permutations(range(rank)).map(list)),
            st.tuples(st.just("select.int"), st.just(dim), st.integers(-length, length - 1)),
            st.tuples(st.just("slice.Tensor"), axis, bound, bound, st.integers(1, 3)),
            st.tuples(st.just("split.Tensor"), st.integers(1, 4), axis),
            st.tuples(st.just("chunk.default"), st.integers(1, 4), axis),
            st.tuples(st.just("flip.default"), st.just([dim])),
            st.tuples(st.just("flatten.using_ints"), st.just(dim % rank), st.just(-1)),
        )
    )
    assert differences(f"aten.{row[0]}", values, *row[1:]) == []
