"""Rules of products of matrices, and of what is made of them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import tensor

from helpers.rule_comparison import differences
from helpers.rule_rows import BTD, DIVISORS, INTS, SQUARE, F, G, call, named, paired, text
from jax_attn.translate.rules.table import RULES

POSITIVE = SQUARE @ SQUARE.T + torch.eye(3)

ROWS = [
    ("linear.default", BTD, torch.ones(7, 5) * 0.3, torch.arange(7.0)),
    ("linear.default", BTD, torch.ones(7, 5) * 0.3),
    ("matmul.default", BTD, torch.ones(5, 2) * 0.7),
    ("matmul.default", BTD, BTD.mT.contiguous()),
    ("mm.default", F, G.T.contiguous()),
    ("bmm.default", BTD, BTD.mT.contiguous()),
    ("addmm.default", tensor([1.0, 2.0]), F, G.T.contiguous()),
    ("addmm.default", tensor([1.0, 2.0]), F, G.T.contiguous(), {"alpha": 2, "beta": 0.5}),
    ("baddbmm.default", tensor(1.0), BTD, BTD.mT.contiguous()),
    ("einsum.default", "bij,bkj->bik", [BTD, BTD]),
    ("outer.default", F[0], G[0]),
    ("vdot.default", F[0], G[0]),
    ("inner.default", F, G),
    ("kron.default", F, G),
    ("addbmm.default", SQUARE[:3, :3].contiguous(), torch.ones(2, 3, 5), BTD.mT.contiguous()),
    ("addr.default", SQUARE[:3, :3].contiguous(), F[0], G[0]),
    ("cross.default", F, G),
    ("cross.default", F.T.contiguous(), G.T.contiguous()),
    ("linalg_cross.default", F, G),
    ("tensordot.default", BTD, BTD, [0, 2], [0, 2]),
    ("cdist.default", BTD, BTD[:, :2].contiguous()),
    ("cdist.default", BTD, BTD, 2.0),
    ("cdist.default", BTD, BTD, 1.0),
    ("cdist.default", BTD, BTD[:, :2].contiguous(), 3.0),
    ("bilinear.default", F, G, torch.arange(18.0).reshape(2, 3, 3), F[0, :2]),
    ("linalg_vecdot.default", F, G),
    ("linalg_vecdot.default", F, G, {"dim": 0}),
    ("pairwise_distance.default", F, G),
    ("pairwise_distance.default", F, F, 1.0, 1e-06, True),
    ("pairwise_distance.default", F, G, 3.0),
    ("cosine_similarity.default", F, G),
    ("cosine_similarity.default", F * 0, G, -1),
    ("cosine_similarity.default", BTD, BTD[:1], 2),
    ("linalg_multi_dot.default", [F, SQUARE[:3, :2].contiguous(), G]),
    ("addmm.default", F[0, :2].contiguous(), F, G.T.contiguous(), {"beta": 0}),
    ("mm.default", INTS, DIVISORS.T.contiguous()),
    ("einsum.default", "b i, b j -> i j", [F, G]),
    ("einsum.default", "...i->...", [F]),
    ("matmul.default", F[0], G[0]),
    ("mv.default", F, G[0]),
    ("addmv.default", F[:, 0].contiguous(), F, G[0]),
    ("linear.default", F[0], G[0]),
    ("linear.default", F[0], G, F[0, :2].contiguous()),
]

DECOMPOSITIONS = [
    ("matrix_power.default", SQUARE, 3),
    ("inverse.default", SQUARE),
    ("linalg_inv.default", torch.stack([SQUARE, POSITIVE])),
    ("linalg_det.default", SQUARE),
    ("det.default", torch.stack([SQUARE, POSITIVE])),
    ("linalg_slogdet.default", SQUARE),
    ("logdet.default", POSITIVE),
    ("linalg_cholesky.default", POSITIVE),
    ("linalg_cholesky.default", POSITIVE, {"upper": True}),
    ("linalg_qr.default", SQUARE),
    ("linalg_svdvals.default", SQUARE),
    ("linalg_svd.default", SQUARE, False),
    ("linalg_eigh.default", POSITIVE),
    ("linalg_eigvalsh.default", POSITIVE),
    ("linalg_solve.default", SQUARE, SQUARE + 1),
    ("linalg_solve.default", SQUARE, SQUARE[0].contiguous()),
    ("linalg_solve.default", torch.stack([SQUARE, POSITIVE]), BTD[:, 0, :3].contiguous()),
    ("linalg_solve_triangular.default", SQUARE.triu(), SQUARE, {"upper": True}),
    ("linalg_solve_triangular.default", SQUARE.tril(), SQUARE, {"upper": False, "left": False}),
]

TEXTS = [
    (("linear.default", BTD, torch.ones(7, 5), torch.ones(7)), "x0 @ x1.T + x2"),
    (("matmul.default", BTD, torch.ones(5, 2)), "x0 @ x1"),
    (("addmm.default", torch.ones(2), F, G.T), "x0 + x1 @ x2"),
    (("addmm.default", torch.ones(2), F, G.T, {"alpha": 2, "beta": 0}), "2 * (x1 @ x2)"),
    (("einsum.default", "bij,bkj->bik", [BTD, BTD]), "jnp.einsum('bij,bkj->bik', x0, x1)"),
    (("linalg_vecdot.default", F, G), "jnp.vecdot(x0, x1)"),
    (("cdist.default", BTD, BTD), "distances(x0, x1)"),
    (("linalg_multi_dot.default", [F, SQUARE, G.T]), "x0 @ x1 @ x2"),
]

PLANTED = [
    (("linear.default", BTD, torch.ones(5, 5).tril()), "input @ weight"),
    (("addmm.default", torch.ones(2), F, G.T, {"alpha": 2}), "self + mat1 @ mat2"),
    (("tensordot.default", SQUARE, SQUARE, [0], [1]), "jnp.tensordot(self, other, 1)"),
    (("cdist.default", BTD, BTD), "jnp.linalg.norm(x1[:, :, None] - x2[:, None], axis=-1)"),
    (("cosine_similarity.default", F * 0, G, 1), "(x1 * x2).sum(1) / jnp.linalg.norm(x1, axis=1)"),
    (("linalg_cholesky.default", POSITIVE, {"upper": True}), "jnp.linalg.cholesky(self)"),
]


@pytest.mark.parametrize(
    ("name", "args", "kwargs"), named(ROWS) + named(DECOMPOSITIONS, pytest.mark.slow)
)
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


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    st.lists(st.sampled_from([1, 2]), max_size=2),
    st.lists(st.sampled_from([1, 2]), max_size=2),
    st.sampled_from(["vector", "matrix"]),
    st.sampled_from(["vector", "matrix"]),
)
def test_matmul_of_any_ranks(batch, other_batch, first, second):
    both = min(len(batch), len(other_batch))
    other_batch[len(other_batch) - both :] = batch[len(batch) - both :]
    shape = [3] if first == "vector" else [*batch, 2, 3]
    other = [3] if second == "vector" else [*other_batch, 3, 5]
    values = [
        torch.arange(1.0, 1.0 + torch.Size(s).numel()).reshape(s).sin() for s in (shape, other)
    ]
    assert differences("aten.matmul.default", *values) == []
