"""Rules of products of matrices, and of what is made of them."""

import itertools
import random

import torch
from torch import tensor

from helpers.rules.rows import BTD, DIVISORS, INTS, SQUARE, F, G, draws, row, table

real, _ = draws(4)
POSITIVE = SQUARE @ SQUARE.T + torch.eye(3)

ROWS = [
    row("linear.default", BTD, torch.ones(7, 5) * 0.3, torch.arange(7.0)),
    row("linear.default", BTD, torch.ones(7, 5) * 0.3),
    row("matmul.default", BTD, torch.ones(5, 2) * 0.7),
    row("matmul.default", BTD, BTD.mT.contiguous()),
    row("mm.default", F, G.T.contiguous()),
    row("bmm.default", BTD, BTD.mT.contiguous()),
    row("addmm.default", tensor([1.0, 2.0]), F, G.T.contiguous()),
    row("addmm.default", tensor([1.0, 2.0]), F, G.T.contiguous(), alpha=2, beta=0.5),
    row("baddbmm.default", tensor(1.0), BTD, BTD.mT.contiguous()),
    row("einsum.default", "bij,bkj->bik", [BTD, BTD]),
    row("outer.default", F[0], G[0]),
    row("vdot.default", F[0], G[0]),
    row("inner.default", F, G),
    row("kron.default", F, G),
    row("addbmm.default", SQUARE[:3, :3].contiguous(), torch.ones(2, 3, 5), BTD.mT.contiguous()),
    row("addr.default", SQUARE[:3, :3].contiguous(), F[0], G[0]),
    row("cross.default", F, G),
    row("cross.default", F.T.contiguous(), G.T.contiguous()),
    row("linalg_cross.default", F, G),
    row("tensordot.default", BTD, BTD, [0, 2], [0, 2]),
    row("cdist.default", BTD, BTD[:, :2].contiguous()),
    row("cdist.default", BTD, BTD, 2.0),
    row("cdist.default", BTD, BTD, 1.0),
    row("cdist.default", BTD, BTD[:, :2].contiguous(), 3.0),
    row("bilinear.default", F, G, torch.arange(18.0).reshape(2, 3, 3), F[0, :2]),
    row("linalg_vecdot.default", F, G),
    row("linalg_vecdot.default", F, G, dim=0),
    row("pairwise_distance.default", F, G),
    row("pairwise_distance.default", F, F, 1.0, 1e-06, True),
    row("pairwise_distance.default", F, G, 3.0),
    row("cosine_similarity.default", F, G),
    row("cosine_similarity.default", F * 0, G, -1),
    row("cosine_similarity.default", BTD, BTD[:1], 2),
    row("linalg_multi_dot.default", [F, SQUARE[:3, :2].contiguous(), G]),
    row("addmm.default", F[0, :2].contiguous(), F, G.T.contiguous(), beta=0),
    row("mm.default", INTS, DIVISORS.T.contiguous()),
    row("einsum.default", "b i, b j -> i j", [F, G]),
    row("einsum.default", "...i->...", [F]),
    row("matmul.default", F[0], G[0]),
    row("mv.default", F, G[0]),
    row("addmv.default", F[:, 0].contiguous(), F, G[0]),
    row("linear.default", F[0], G[0]),
    row("linear.default", F[0], G, F[0, :2].contiguous()),
]

DECOMPOSITIONS = [
    row("matrix_power.default", SQUARE, 3),
    row("inverse.default", SQUARE),
    row("linalg_inv.default", torch.stack([SQUARE, POSITIVE])),
    row("linalg_det.default", SQUARE),
    row("det.default", torch.stack([SQUARE, POSITIVE])),
    row("linalg_slogdet.default", SQUARE),
    row("logdet.default", POSITIVE),
    row("linalg_cholesky.default", POSITIVE),
    row("linalg_cholesky.default", POSITIVE, upper=True),
    row("linalg_qr.default", SQUARE),
    row("linalg_svdvals.default", SQUARE),
    row("linalg_svd.default", SQUARE, False),
    row("linalg_eigh.default", POSITIVE),
    row("linalg_eigvalsh.default", POSITIVE),
    row("linalg_solve.default", SQUARE, SQUARE + 1),
    row("linalg_solve.default", SQUARE, SQUARE[0].contiguous()),
    row("linalg_solve.default", torch.stack([SQUARE, POSITIVE]), BTD[:, 0, :3].contiguous()),
    row("linalg_solve_triangular.default", SQUARE.triu(), SQUARE, upper=True),
    row("linalg_solve_triangular.default", SQUARE.tril(), SQUARE, upper=False, left=False),
]

TEXTS = [
    row("linear.default", BTD, torch.ones(7, 5), torch.ones(7), text="x0 @ x1.T + x2"),
    row("matmul.default", BTD, torch.ones(5, 2), text="x0 @ x1"),
    row("addmm.default", torch.ones(2), F, G.T, text="x0 + x1 @ x2"),
    row("addmm.default", torch.ones(2), F, G.T, alpha=2, beta=0, text="2 * (x1 @ x2)"),
    row("einsum.default", "bij,bkj->bik", [BTD, BTD], text="jnp.einsum('bij,bkj->bik', x0, x1)"),
    row("linalg_vecdot.default", F, G, text="jnp.vecdot(x0, x1)"),
    row("cdist.default", BTD, BTD, text="distances(x0, x1)"),
    row("linalg_multi_dot.default", [F, SQUARE, G.T], text="x0 @ x1 @ x2"),
]

MISTAKES = [
    row("linear.default", BTD, torch.ones(5, 5).tril(), wrong="input @ weight"),
    row("addmm.default", torch.ones(2), F, G.T, alpha=2, wrong="self + mat1 @ mat2"),
    row("tensordot.default", SQUARE, SQUARE, [0], [1], wrong="jnp.tensordot(self, other, 1)"),
    row("cdist.default", BTD, BTD, wrong="jnp.linalg.norm(x1[:, :, None] - x2[:, None], axis=-1)"),
    row(
        "cosine_similarity.default",
        F * 0,
        G,
        1,
        wrong="(x1 * x2).sum(1) / jnp.linalg.norm(x1, axis=1)",
    ),
    row("linalg_cholesky.default", POSITIVE, upper=True, wrong="jnp.linalg.cholesky(self)"),
]


def drawn():
    """Products of vectors and matrices in batches that broadcast."""
    rng = random.Random(1)
    for first, second in itertools.product([[3], [2, 3]], [[3], [3, 5]]):
        for _ in range(3):
            batch = [rng.randint(1, 2) for _ in range(rng.randint(0, 2))]
            other = [rng.choice([1, size]) for size in batch][rng.randint(0, 2) :]
            shapes = first if len(first) == 1 else batch + first, second
            shapes = shapes[0], second if len(second) == 1 else other + second
            yield row("matmul.default", *(real(*shape) for shape in shapes))


@table(ROWS, DECOMPOSITIONS, TEXTS, drawn(), MISTAKES)
def test_values_gradients_and_dtypes_are_those_of_torch(row):
    row.check()
