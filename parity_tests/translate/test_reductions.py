"""Rules of operators that reduce axes, or run along one."""

import random

import pytest
import torch
from torch import tensor

from helpers.rules.rows import (
    BOOLS,
    BTD,
    COMPLEX,
    HALF,
    INF,
    INTS,
    NAN,
    SCALAR,
    SQUARE,
    F,
    X,
    row,
    table,
    written,
)

WITH_NAN = tensor([[1.0, NAN, 3.0], [2.0, 0.0, 1.0]])
POSITIVE = SQUARE @ SQUARE.T

ROWS = [
    row("sum.default", F),
    row("sum.dim_IntList", BOOLS, [1], True),
    row("sum.dim_IntList", BTD, [0, -1]),
    row("sum.default", INTS.to(torch.uint8)),
    row("sum.dim_IntList", HALF, [1], dtype=torch.float32),
    row("mean.dim", BTD, [-1], True),
    row("mean.default", F),
    row("mean.dim", INTS, [1], dtype=torch.float32),
    row("var.correction", BTD, [1]),
    row("var.correction", BTD, [-1], correction=0, keepdim=True),
    row("var.correction", BTD),
    row("amax.default", F, [1]),
    row("amin.default", F),
    row("max.default", F),
    row("max.dim", F, 1),
    row("max.dim", F, 0, True),
    row("min.dim", F, 1),
    row("max.dim", SCALAR, 0),
    row("argmax.default", F),
    row("argmax.default", X, 1, True),
    row("softmax.int", BTD, -1),
    row("softmax.int", BTD, 1),
    row("softmax.int", HALF, -1, torch.float32),
    row("softmax.int", SCALAR, 0),
    row("log_softmax.int", BTD, -1),
    row("_softmax.default", BTD, -1, False),
    row("_safe_softmax.default", tensor([[-INF] * 3, [1.0, 2.0, -INF]]), -1),
    row("cumsum.default", BOOLS, -1),
    row("cumsum.default", F, 0),
    row("cumsum.default", INTS.to(torch.int8), 0),
    row("any.default", BOOLS),
    row("any.dim", INTS, 1),
    row("all.dim", F, -1, True),
    row("any.default", INTS.to(torch.uint8)),
    row("sum.default", COMPLEX),
    row("var.default", BTD),
    row("var.dim", BTD, [1], False),
    row("std.default", BTD, False),
    row("std.correction", BTD, [-1], correction=0),
    row("std.correction", torch.ones(2, 3), [-1]),
    row("var_mean.correction", BTD, [0, 2], keepdim=True),
    row("std_mean.dim", BTD, [1]),
    row("var.correction", BTD[:, :, :1], [2]),
    row("prod.default", F),
    row("prod.dim_int", F, 1, True),
    row("prod.default", BOOLS),
    row("nansum.default", WITH_NAN, [1]),
    row("nanmean.default", WITH_NAN, [1], True),
    row("linalg_vector_norm.default", torch.ones(2, 3), 2, None, True),
    row("linalg_vector_norm.default", HALF, 2, [1], dtype=torch.float32),
    row("norm.Scalar", F),
    row("norm.ScalarOpt_dim", F, 2, [-1], True),
    row("norm.ScalarOpt_dim", F, 1, [-1], True),
    row("frobenius_norm.dim", BTD, [1, 2]),
    row("linalg_norm.default", BTD),
    row("linalg_norm.default", F, 1, [1]),
    row("linalg_matrix_norm.str_ord", BTD),
    row("logsumexp.default", BTD, [1]),
    row("logsumexp.default", F, [0, 1], True),
    row("logsumexp.default", INTS, [0]),
    row("aminmax.default", F),
    row("aminmax.default", F, dim=1, keepdim=True),
    row("count_nonzero.default", F),
    row("count_nonzero.dim_IntList", F, [1]),
    row("cummax.default", F, 1),
    row("cummax.default", X, 1),
    row("cummin.default", F, 0),
    row("cummin.default", INTS.to(torch.uint8), 1),
    row("logcumsumexp.default", BTD, 1),
    row("cumprod.default", F, 1),
    row("cumprod.default", INTS, -1),
    row("cumsum.default", INTS, 0, dtype=torch.float32),
    row("cumsum.default", INTS.to(torch.uint8), 0),
    row("quantile.default", BTD, tensor([0.1, 0.5]), 1),
    row("quantile.scalar", BTD, 0.3, -1, True),
    row("quantile.scalar", BTD, 0.3, interpolation="nearest"),
    row("trace.default", SQUARE[:3, :3].contiguous()),
    row("sum.dim_IntList", SCALAR, [0]),
    row("mean.dim", SCALAR, [-1]),
    row("amax.default", SCALAR, [0]),
    row("argmax.default", SCALAR),
    row("any.dim", BOOLS, 0, True),
    row("any.dims", BOOLS),
    row("all.dims", BOOLS, [0, 1]),
    row("max.default", X),
    row("sum.dim_IntList", BTD, None),
    row("sum.dim_IntList", BTD, [], True),
    row("argmax.default", F, None, True),
    row("min.dim", X, 1),
    row("max.dim", INTS, 1),
    row("max.dim", BOOLS, 0),
    *[
        row("linalg_vector_norm.default", F, order, [1])
        for order in (2, 1, 0, 3, 0.5, 2.5, INF, -INF)
    ],
]

TEXTS = [
    row("sum.dim_IntList", BTD, [-1], True, text="x0.sum(-1, keepdims=True)"),
    row("sum.default", F, text="x0.sum()"),
    row("mean.dim", BTD, [1, 2], text="x0.mean((1, 2))"),
    row("var.correction", BTD, [-1], text="x0.var(-1, ddof=1)"),
    row("amax.default", BTD, [-1], text="x0.max(-1)"),
    row("argmax.default", BTD, -1, text="x0.argmax(-1)"),
    row("softmax.int", BTD, -1, text="jax.nn.softmax(x0)"),
    row("softmax.int", BTD, 1, text="jax.nn.softmax(x0, axis=1)"),
    row("softmax.int", HALF, -1, torch.float32, text="jax.nn.softmax(x0.astype(jnp.float32))"),
    row("cumsum.default", BTD, -1, text="x0.cumsum(-1)"),
    row("any.dim", BOOLS, -1, text="x0.any(-1)"),
    row(
        "linalg_vector_norm.default",
        F,
        2,
        [-1],
        True,
        text="safe_sqrt(jnp.square(x0).sum(-1, keepdims=True))",
    ),
]

MISTAKES = [
    row("sum.default", INTS.to(torch.uint8), wrong="self.sum()"),  # uint32
    row("sum.dim_IntList", BTD, [-1], True, wrong="self.sum(-1)"),
    row("var.correction", BTD, [1], wrong="self.var(1)"),
    row("min.dim", F, 1, wrong=lambda: ("self.min(1)", "self.argmin(1)")),  # shares the gradient
    row("std.correction", torch.ones(2, 3), [1], wrong="jnp.sqrt(self.var(1, ddof=1))"),  # 0 / 0
    row("linalg_vector_norm.default", F * 0, wrong="jnp.linalg.norm(self)"),
    row("softmax.int", BTD, 1, wrong="jax.nn.softmax(self)"),
    row("cummax.default", F, 1, wrong=lambda: ("jax.lax.cummax(self, 1)", "self.argmax(1)")),
    row("cumsum.default", INTS.to(torch.int8), 0, wrong="self.cumsum(0)"),
]


def drawn():
    """Reductions over any axes, of values with ties."""
    rng = random.Random(1)
    options = {"var.correction": {"correction": 0}, "linalg_vector_norm.default": {"ord": 2}}
    options["std.correction"] = options["var.correction"]
    for name in ("sum.dim_IntList", "mean.dim", "amax.default", "logsumexp.default", *options):
        for _ in range(3):
            shape = [rng.randint(1, 3) for _ in range(rng.randint(1, 3))]
            values = torch.arange(torch.Size(shape).numel()).reshape(shape) % 3 * 0.5
            axes = rng.sample(range(len(shape)), rng.randint(1, len(shape)))
            dim = [axis - rng.choice([0, len(shape)]) for axis in axes]
            keepdim = rng.random() < 0.5
            yield row(name, values, dim=dim, keepdim=keepdim, **options.get(name, {}))


@table(ROWS, TEXTS, drawn(), MISTAKES)
def test_values_gradients_and_dtypes_are_those_of_torch(row):
    row.check()


@pytest.mark.parametrize(
    ("name", "args", "kwargs"),
    [("cummax.default", (BOOLS, 0), {}), ("var.correction", (BTD, [1]), {"correction": 3})],
)
def test_what_has_no_equal_is_refused(name, args, kwargs):
    with pytest.raises(NotImplementedError):
        written(name, *args, **kwargs)
