"""Rules of operators that treat each element alike."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import tensor

from helpers.rule_comparison import differences
from helpers.rule_rows import (
    BOOLS,
    BTD,
    DIVISORS,
    HALF,
    INTS,
    KINKS,
    SCALAR,
    F,
    G,
    X,
    call,
    named,
    paired,
    text,
)
from jax_attn.translate.rules.table import RULES

COMPLEX = torch.complex(F, G)
UNIT = tensor([0.1, 0.5, 0.2, 0.9])

ROWS = [
    ("gelu.default", X),
    ("gelu.default", X, {"approximate": "tanh"}),
    ("softplus.default", X),
    ("softplus.default", X, 2, 3.0),
    ("elu.default", X),
    ("elu.default", X, 0.5),
    ("elu.default", X, 0.5, 2.0, 3.0),
    ("leaky_relu.default", X, 0.1),
    ("prelu.default", BTD, tensor([0.1, 0.2, 0.3])),
    ("prelu.default", BTD, tensor([0.1])),
    ("glu.default", BTD[:, :2], 1),
    ("clamp.default", X, 0.0),
    ("clamp.default", X, 0.0, 1.0),
    ("clamp.default", X, None, 1.0),
    ("clamp.default", INTS, 0),
    ("clamp.default", INTS, 0.5, 2),
    ("clamp.Tensor", F, G, None),
    ("clamp_min.default", F, 0),
    ("clamp_max.Tensor", F, G),
    ("add.Tensor", INTS, 1.5),
    ("add.Tensor", HALF, tensor(2.0)),
    ("add.Tensor", F, tensor(1.5, dtype=torch.float16)),
    ("add.Tensor", INTS, tensor(1.5)),
    ("add.Tensor", BOOLS, 1),
    ("add.Tensor", HALF, F),
    ("add.Tensor", F, G, {"alpha": 2}),
    ("sub.Tensor", INTS, DIVISORS),
    ("rsub.Scalar", F, 1),
    ("mul.Tensor", F, G),
    ("mul.Tensor", INTS, BOOLS),
    ("div.Tensor", INTS, DIVISORS),
    ("div.Tensor", F, 2),
    ("div.Tensor_mode", INTS, DIVISORS, {"rounding_mode": "floor"}),
    ("div.Tensor_mode", INTS, DIVISORS, {"rounding_mode": "trunc"}),
    ("div.Tensor_mode", F, G, {"rounding_mode": "trunc"}),
    ("div.Tensor_mode", F, G, {"rounding_mode": "floor"}),
    ("div.Tensor_mode", INTS, 2, {"rounding_mode": "trunc"}),
    ("remainder.Tensor", INTS, DIVISORS),
    ("remainder.Tensor", F, G),
    ("remainder.Scalar", F, 2),
    ("fmod.Tensor", INTS, DIVISORS),
    ("fmod.Tensor", F, G),
    ("floor_divide.default", F, G),
    ("floor_divide.default", INTS, DIVISORS),
    ("pow.Tensor_Scalar", F, 2),
    ("pow.Tensor_Scalar", F, 3),
    ("pow.Tensor_Scalar", F, 2.0),
    ("pow.Tensor_Scalar", G, -0.5),
    ("pow.Tensor_Scalar", F, 0.5),
    ("pow.Tensor_Scalar", INTS, 2),
    ("pow.Tensor_Scalar", INTS, 2.5),
    ("pow.Tensor_Tensor", F, G),
    ("pow.Tensor_Tensor", G.abs(), F),
    ("pow.Scalar", 2, F),
    ("pow.Scalar", 2.0, INTS),
    ("pow.Tensor_Scalar", F, 0),
    ("pow.Tensor_Scalar", F, -2),
    ("maximum.default", F, G),
    ("minimum.default", F, G),
    ("maximum.default", INTS, DIVISORS),
    ("eq.Tensor", INTS, DIVISORS),
    ("eq.Scalar", F, 0),
    ("ge.Scalar", INTS, 0.5),
    ("lt.Tensor", F, G),
    ("where.self", BOOLS, F, G),
    ("where.self", BOOLS, HALF, tensor(1.0)),
    ("where.ScalarOther", BOOLS, F, 0),
    ("where.ScalarOther", BOOLS, INTS, 0.5),
    ("where.Scalar", BOOLS, 1.0, 0.0),
    ("where.Scalar", BOOLS, 1, 0),
    ("bitwise_and.Tensor", BOOLS, BOOLS),
    ("bitwise_not.default", BOOLS),
    ("logical_and.default", INTS, BOOLS),
    ("logical_not.default", F),
    ("_to_copy.default", F, {"dtype": torch.int64}),
    ("_to_copy.default", INTS, {"dtype": torch.float32}),
    ("_to_copy.default", BOOLS, {"dtype": torch.float16}),
    ("_to_copy.default", X[:2, :4], {"dtype": torch.bool}),
    ("hardtanh.default", tensor([-1.0, 0.0, 1.0, 2.0, -3.0])),
    ("hardtanh.default", tensor([-1.0, 0.0, 1.0, 2.0, -3.0]), 0.0, 2.0),
    ("relu6.default", tensor([0.0, 6.0, 7.0, 3.0])),
    ("hardswish.default", tensor([-3.0, 3.0, 0.0, 1.0, 5.0, -5.0])),
    ("hardshrink.default", X),
    ("softshrink.default", X),
    ("softshrink.default", X, 1.0),
    ("threshold.default", X, 0.5, 20.0),
    ("celu.default", X[0], 0.5),
    ("_prelu_kernel.default", X[0], tensor([0.2])),
    ("logit.default", tensor([0.1, 0.5, 0.2, 0.9]), 0.2),
    ("nan_to_num.default", X),
    ("nan_to_num.default", X, 1.0, 2.0, 3.0),
    ("nan_to_num.default", X, {"posinf": 5.0}),
    ("isclose.default", F, G),
    ("isclose.default", F, F + 1e-09),
    ("isclose.default", X, X, {"equal_nan": True}),
    ("lerp.Scalar", F, G, 0.3),
    ("lerp.Tensor", F, G, G),
    ("addcmul.default", F, G, G),
    ("addcmul.default", F, G, G, {"value": 0.5}),
    ("addcdiv.default", F, G, G, {"value": 2}),
    ("atan2.default", F, G),
    ("hypot.default", F, G),
    ("logaddexp.default", F, G),
    ("logaddexp2.default", F, G),
    ("heaviside.default", F, tensor(0.5)),
    ("gcd.default", INTS, DIVISORS),
    ("lcm.default", INTS, DIVISORS),
    ("copysign.Tensor", F, G),
    ("copysign.Scalar", G, -1.0),
    ("fmax.default", F, G),
    ("fmin.default", X[:2], X[1:]),
    ("fmax.default", X[:2], X[1:]),
    ("xlogy.Tensor", F.abs(), G.abs()),
    ("xlogy.Scalar_Other", F, 2.0),
    ("xlogy.Scalar_Self", 2.0, G.abs()),
    ("float_power.Tensor_Scalar", INTS, 2),
    ("float_power.Tensor_Tensor", F, G),
    ("bitwise_left_shift.Tensor", INTS, DIVISORS.abs()),
    ("__rshift__.Scalar", INTS, 1),
    ("bitwise_or.Scalar", INTS, 4),
    ("__and__.Tensor", BOOLS, BOOLS),
    ("bitwise_xor.Tensor", INTS, DIVISORS),
    ("real.default", COMPLEX),
    ("imag.default", COMPLEX),
    ("view_as_real.default", COMPLEX),
    ("view_as_complex.default", torch.stack([F, G], -1)),
    ("complex.default", F, G),
    ("_conj.default", COMPLEX),
    ("mul.Tensor", COMPLEX, COMPLEX),
    ("angle.default", COMPLEX),
    ("abs.default", COMPLEX),
    ("type_as.default", F, INTS),
    ("round.decimals", X[0] * 1.237, {"decimals": 1}),
    ("round.default", tensor([0.5, 1.5, 2.5, -0.5])),
    ("clip.default", F, 0, 1),
    ("div.Tensor", BOOLS, BOOLS),
    ("floor_divide.Scalar", INTS, 2),
    ("sub.Tensor", tensor(1), tensor(0.5)),
    ("mul.Tensor", HALF, INTS),
    ("exp.default", SCALAR),
    ("add.Tensor", HALF.bfloat16(), tensor(0.5)),
    ("mul.Tensor", INTS.to(torch.uint8), 2),
    ("mul.Tensor", INTS.to(torch.int8), INTS.to(torch.uint8)),
    ("bitwise_not.default", INTS),
    ("gelu.default", HALF),
    ("clamp.default", HALF, 0, 1),
    ("hardtanh.default", HALF),
    ("leaky_relu.default", HALF, 0.1),
    ("softshrink.default", HALF),
    ("hardswish.default", HALF.bfloat16()),
    ("nan_to_num.default", HALF),
    ("celu.default", HALF),
    ("elu.default", HALF),
    ("threshold.default", HALF, 0, 1.0),
    ("pow.Tensor_Scalar", HALF, 1.7),
    ("rsub.Scalar", HALF, 1.0),
    ("lerp.Scalar", HALF, HALF, 0.5),
    ("addcmul.default", HALF, HALF, HALF),
    ("logit.default", HALF, 0.1),
    ("where.ScalarSelf", BOOLS, 1.0, HALF),
    ("abs.default", HALF),
    ("sin.default", INTS),
    ("angle.default", torch.complex(F, G)),
    ("polar.default", G.abs(), F),
    *[
        (f"{name}.default", X)
        for name in [
            "abs",
            "ceil",
            "cos",
            "erf",
            "exp",
            "floor",
            "isinf",
            "isnan",
            "log_sigmoid",
            "mish",
            "neg",
            "relu",
            "round",
            "selu",
            "sigmoid",
            "silu",
            "sin",
            "square",
            "tanh",
            "trunc",
            "hardshrink",
            "frac",
        ]
    ],
    *[
        (f"{name}.default", UNIT)
        for name in ["acos", "asin", "atanh", "erfinv", "logit", "special_ndtri"]
    ],
    *[
        (f"{name}.default", KINKS)
        for name in [
            "sign",
            "celu",
            "hardtanh",
            "relu6",
            "hardswish",
            "softshrink",
            "gelu",
            "elu",
            "atan",
            "asinh",
            "sinh",
            "cosh",
            "tan",
            "sinc",
            "special_entr",
            "erfc",
            "special_erf",
            "special_log_ndtr",
            "special_ndtr",
            "i0",
            "special_i1",
            "exp2",
            "expm1",
            "deg2rad",
            "isposinf",
            "signbit",
        ]
    ],
    *[
        (f"{name}.default", UNIT + 1)
        for name in [
            "acosh",
            "log",
            "log2",
            "log10",
            "log1p",
            "sqrt",
            "lgamma",
            "rsqrt",
            "reciprocal",
        ]
    ],
    *[
        (f"{name}.default", INTS)
        for name in [
            "sin",
            "exp",
            "erf",
            "sigmoid",
            "reciprocal",
            "abs",
            "ceil",
            "round",
            "trunc",
            "floor",
            "tanh",
            "square",
            "sign",
        ]
    ],
    ("digamma.default", tensor([1, 2, 5])),
    # Within, torch's backward multiplies by 1/6 in float32.
    ("hardsigmoid.default", tensor([-3.0, 3.0, 5.0, -5.0])),
    *[
        (f"{name}.{kind}", F, other)
        for name in ["eq", "ne", "lt", "le", "gt", "ge"]
        for kind, other in (("Tensor", G), ("Scalar", 2))
    ],
]

TEXTS = [
    (("add.Tensor", F, G), "x0 + x1"),
    (("add.Tensor", F, G, {"alpha": 2}), "x0 + 2 * x1"),
    (("add.Tensor", HALF, tensor(2.0)), "x0 + x1.astype(jnp.float16)"),
    (("mul.Tensor", F, 0.125), "x0 * 0.125"),
    (("mul.Tensor", INTS, 0.5), "x0.astype(jnp.float32) * 0.5"),
    (("rsub.Scalar", F, 1.0), "1.0 - x0"),
    (("pow.Tensor_Scalar", F, 2), "jnp.square(x0)"),
    (("pow.Tensor_Scalar", F, 3.0), "x0 ** 3"),
    (("gelu.default", F), "jax.nn.gelu(x0, approximate=False)"),
    (("gelu.default", F, {"approximate": "tanh"}), "jax.nn.gelu(x0)"),
    (("softplus.default", F), "jax.nn.softplus(x0)"),
    (("clamp.default", INTS, 0, 5), "jnp.clip(x0, 0, 5)"),
    (("clamp.default", F, None, 5.0), "clamp(x0, None, 5.0)"),
    (("_to_copy.default", F, {"dtype": torch.bfloat16}), "x0.astype(jnp.bfloat16)"),
    (("_to_copy.default", F, {"dtype": torch.float32}), "x0"),
    (("prelu.default", BTD, tensor([0.1, 0.2, 0.3])), "jnp.where(x0 > 0, x0, x1[:, None] * x0)"),
]

PLANTED = [
    (("abs.default", F), "jnp.abs(self)"),  # gradient 1 at 0
    (("clamp.default", X, 0.0), "jnp.clip(self, min, max)"),  # gradient 1/2 at 0
    (("hardtanh.default", KINKS), "clamp(self, min_val, max_val)"),  # gradient 1 at 1
    (("leaky_relu.default", F, 0.1), "jax.nn.leaky_relu(self, negative_slope)"),  # gradient 1 at 0
    (("gelu.default", F), "jax.nn.gelu(self)"),
    (("remainder.Tensor", INTS, DIVISORS), "jnp.fmod(self, other)"),
    (("div.Tensor_mode", INTS, DIVISORS, {"rounding_mode": "trunc"}), "self // other"),
    (("add.Tensor", HALF, SCALAR), "self + other"),  # float32
    (("mul.Tensor", INTS, 1.5), "self * other"),  # a weak dtype
    (("round.default", tensor([0.5, 1.5, 2.5])), "jnp.floor(self + 0.5)"),
    (("fmax.default", F, G), "jnp.maximum(self, other)"),
    (("addcmul.default", F, G, G, {"value": 0.5}), "self + tensor1 * tensor2"),
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


def test_what_has_no_equal_is_refused():
    with pytest.raises(NotImplementedError):
        text(("angle.default", F))


SHAPES = st.lists(st.sampled_from([1, 2, 3]), max_size=3)


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    st.sampled_from(["add", "mul", "div", "maximum", "atan2", "where", "pow", "remainder"]),
    SHAPES,
    st.lists(st.booleans(), min_size=3, max_size=3),
    st.integers(0, 3),
    st.sampled_from([torch.float32, torch.float16, torch.int64]),
)
def test_operands_of_any_shapes_and_dtypes(name, shape, ones, missing, dtype):
    values = torch.arange(1.0, 1.0 + torch.Size(shape).numel()).reshape(shape)
    other = [1 if one else size for one, size in zip(ones, shape, strict=False)][missing:]
    second = (torch.ones(other) * 2).to(dtype)
    kinds = {"maximum": "default", "atan2": "default", "where": "self", "pow": "Tensor_Tensor"}
    row = f"aten.{name}.{kinds.get(name, 'Tensor')}"
    condition = [values > 2] if name == "where" else []
    assert differences(row, *condition, values, second) == []
