"""Rules of operators that reduce axes, or run along one."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import tensor

from helpers.rule_comparison import differences
from helpers.rule_rows import (
    BOOLS,
    BTD,
    HALF,
    INF,
    INTS,
    NAN,
    SCALAR,
    SQUARE,
    F,
    X,
    call,
    named,
    paired,
    text,
)
from jax_attn.translate.rules.table import RULES

COMPLEX = torch.complex(F, 2 * F)
WITH_NAN = tensor([[1.0, NAN, 3.0], [2.0, 0.0, 1.0]])
POSITIVE = SQUARE @ SQUARE.T

ROWS = [
    ("sum.default", F),
    ("sum.dim_IntList", BOOLS, [1], True),
    ("sum.dim_IntList", BTD, [0, -1]),
    ("sum.default", INTS.to(torch.uint8)),
    ("sum.dim_IntList", HALF, [1], {"dtype": torch.float32}),
    ("mean.dim", BTD, [-1], True),
    ("mean.default", F),
    ("mean.dim", INTS, [1], {"dtype": torch.float32}),
    ("var.correction", BTD, [1]),
    ("var.correction", BTD, [-1], {"correction": 0, "keepdim": True}),
    ("var.correction", BTD),
    ("amax.default", F, [1]),
    ("amin.default", F),
    ("max.default", F),
    ("max.dim", F, 1),
    ("max.dim", F, 0, True),
    ("min.dim", F, 1),
    ("max.dim", SCALAR, 0),
    ("argmax.default", F),
    ("argmax.default", X, 1, True),
    ("softmax.int", BTD, -1),
    ("softmax.int", BTD, 1),
    ("softmax.int", HALF, -1, torch.float32),
    ("softmax.int", SCALAR, 0),
    ("log_softmax.int", BTD, -1),
    ("_softmax.default", BTD, -1, False),
    ("_safe_softmax.default", tensor([[-INF] * 3, [1.0, 2.0, -INF]]), -1),
    ("cumsum.default", BOOLS, -1),
    ("cumsum.default", F, 0),
    ("cumsum.default", INTS.to(torch.int8), 0),
    ("any.default", BOOLS),
    ("any.dim", INTS, 1),
    ("all.dim", F, -1, True),
    ("any.default", INTS.to(torch.uint8)),
    ("sum.default", COMPLEX),
    ("var.default", BTD),
    ("var.dim", BTD, [1], False),
    ("std.default", BTD, False),
    ("std.correction", BTD, [-1], {"correction": 0}),
    ("std.correction", torch.ones(2, 3), [-1]),
    ("var_mean.correction", BTD, [0, 2], {"keepdim": True}),
    ("std_mean.dim", BTD, [1]),
    ("var.correction", BTD[:, :, :1], [2]),
    ("prod.default", F),
    ("prod.dim_int", F, 1, True),
    ("prod.default", BOOLS),
    ("nansum.default", WITH_NAN, [1]),
    ("nanmean.default", WITH_NAN, [1], True),
    ("linalg_vector_norm.default", torch.ones(2, 3), 2, None, True),
    ("linalg_vector_norm.default", HALF, 2, [1], {"dtype": torch.float32}),
    ("norm.Scalar", F),
    ("norm.ScalarOpt_dim", F, 2, [-1], True),
    ("norm.ScalarOpt_dim", F, 1, [-1], True),
    ("frobenius_norm.dim", BTD, [1, 2]),
    ("linalg_norm.default", BTD),
    ("linalg_norm.default", F, 1, [1]),
    ("linalg_matrix_norm.str_ord", BTD),
    ("logsumexp.default", BTD, [1]),
    ("logsumexp.default", F, [0, 1], True),
    ("logsumexp.default", INTS, [0]),
    ("aminmax.default", F),
    ("aminmax.default", F, {"dim": 1, "keepdim": True}),
    ("count_nonzero.default", F),
    ("count_nonzero.dim_IntList", F, [1]),
    ("cummax.default", F, 1),
    ("cummax.default", X, 1),
    ("cummin.default", F, 0),
    ("logcumsumexp.default", BTD, 1),
    ("cumprod.default", F, 1),
    ("cumprod.default", INTS, -1),
    ("cumsum.default", INTS, 0, {"dtype": torch.float32}),
    ("cumsum.default", INTS.to(torch.uint8), 0),
    ("quantile.default", BTD, tensor([0.1, 0.5]), 1),
    ("quantile.scalar", BTD, 0.3, -1, True),
    ("quantile.scalar", BTD, 0.3, {"interpolation": "nearest"}),
    ("trace.default", SQUARE[:3, :3].contiguous()),
    ("sum.dim_IntList", SCALAR, [0]),
    ("mean.dim", SCALAR, [-1]),
    ("amax.default", SCALAR, [0]),
    ("argmax.default", SCALAR),
    ("any.dim", BOOLS, 0, True),
    ("any.dims", BOOLS),
    ("all.dims", BOOLS, [0, 1]),
    ("max.default", X),
    ("sum.dim_IntList", BTD, None),
    ("sum.dim_IntList", BTD, [], True),
    ("argmax.default", F, None, True),
    ("min.dim", X, 1),
    ("max.dim", INTS, 1),
    ("max.dim", BOOLS, 0),
    *[("linalg_vector_norm.default", F, order, [1]) for order in (2, 1, 0, 3, 0.5, 2.5, INF, -INF)],
]

TEXTS = [
    (("sum.dim_IntList", BTD, [-1], True), "x0.sum(-1, keepdims=True)"),
    (("sum.default", F), "x0.sum()"),
    (("mean.dim", BTD, [1, 2]), "x0.mean((1, 2))"),
    (("var.correction", BTD, [-1]), "x0.var(-1, ddof=1)"),
    (("amax.default", BTD, [-1]), "x0.max(-1)"),
    (("argmax.default", BTD, -1), "x0.argmax(-1)"),
    (("softmax.int", BTD, -1), "jax.nn.softmax(x0)"),
    (("softmax.int", BTD, 1), "jax.nn.softmax(x0, axis=1)"),
    (("softmax.int", HALF, -1, torch.float32), "jax.nn.softmax(x0.astype(jnp.float32))"),
    (("cumsum.default", BTD, -1), "x0.cumsum(-1)"),
    (("any.dim", BOOLS, -1), "x0.any(-1)"),
    (
        ("linalg_vector_norm.default", F, 2, [-1], True),
        "safe_sqrt(jnp.square(x0).sum(-1, keepdims=True))",
    ),
]

PLANTED = [
    (("sum.default", INTS.to(torch.uint8)), "self.sum()"),  # uint32
    (("sum.dim_IntList", BTD, [-1], True), "self.sum(-1)"),
    (("var.correction", BTD, [1]), "self.var(1)"),
    (("min.dim", F, 1), lambda: ("self.min(1)", "self.argmin(1)")),  # shares the gradient
    (("std.correction", torch.ones(2, 3), [1]), "jnp.sqrt(self.var(1, ddof=1))"),  # 0 / 0
    (("linalg_vector_norm.default", F * 0), "jnp.linalg.norm(self)"),
    (("softmax.int", BTD, 1), "jax.nn.softmax(self)"),
    (("cummax.default", F, 1), lambda: ("jax.lax.cummax(self, 1)", "self.argmax(1)")),
    (("cumsum.default", INTS.to(torch.int8), 0), "self.cumsum(0)"),
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


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    st.sampled_from(
        [
            "sum.dim_IntList",
            "mean.dim",
            "amax.default",
            "logsumexp.default",
            "var.correction",
            "linalg_vector_norm.default",
            "std.correction",
        ]
    ),
    st.lists(st.sampled_from([1, 2, 3]), min_size=1, max_size=3),
    st.data(),
)
def test_any_axes(name, shape, data):
    axes = data.draw(st.sets(st.integers(0, len(shape) - 1), min_size=1))
    dim = [axis - data.draw(st.sampled_from([0, len(shape)])) for axis in axes]
    keepdim = data.draw(st.booleans())
    values = torch.arange(torch.Size(shape).numel()).reshape(shape) % 3 * 0.5
    order = {"ord": 2} if "norm" in name else {}
    correction = {"correction": 0} if "correction" in name else {}
    arguments = {"dim": dim, "keepdim": keepdim, **order, **correction}
    assert differences(f"aten.{name}", values, **arguments) == []
