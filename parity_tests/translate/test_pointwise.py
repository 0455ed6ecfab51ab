"""Rules of operators that treat each element alike."""

import random

import pytest
import torch
from torch import tensor

from helpers.rules.call import FLOAT32
from helpers.rules.rows import (
    BOOLS,
    BTD,
    COMPLEX,
    DIVISORS,
    HALF,
    INTS,
    KINKS,
    SCALAR,
    F,
    G,
    X,
    row,
    rows,
    table,
    written,
)

UNIT = tensor([0.1, 0.5, 0.2, 0.9])

ROWS = [
    row("gelu.default", X),
    row("gelu.default", X, approximate="tanh"),
    row("softplus.default", X),
    row("softplus.default", X, 2, 3.0),
    row("elu.default", X),
    row("elu.default", X, 0.5),
    row("elu.default", X, 0.5, 2.0, 3.0),
    row("leaky_relu.default", X, 0.1),
    row("prelu.default", BTD, tensor([0.1, 0.2, 0.3])),
    row("prelu.default", BTD, tensor([0.1])),
    row("glu.default", BTD[:, :2], 1),
    row("clamp.default", X, 0.0),
    row("clamp.default", X, 0.0, 1.0),
    row("clamp.default", X, None, 1.0),
    row("clamp.default", INTS, 0),
    row("clamp.default", INTS, 0.5, 2),
    row("clamp.Tensor", F, G, None),
    row("clamp_min.default", F, 0),
    row("clamp_max.Tensor", F, G),
    row("add.Tensor", INTS, 1.5),
    row("add.Tensor", HALF, tensor(2.0)),
    row("add.Tensor", F, tensor(1.5, dtype=torch.float16)),
    row("add.Tensor", INTS, tensor(1.5)),
    row("add.Tensor", BOOLS, 1),
    row("add.Tensor", HALF, F),
    row("add.Tensor", F, G, alpha=2),
    row("sub.Tensor", INTS, DIVISORS),
    row("rsub.Scalar", F, 1),
    row("mul.Tensor", F, G),
    row("mul.Tensor", INTS, BOOLS),
    row("div.Tensor", INTS, DIVISORS),
    row("div.Tensor", F, 2),
    row("div.Tensor_mode", INTS, DIVISORS, rounding_mode="floor"),
    row("div.Tensor_mode", INTS, DIVISORS, rounding_mode="trunc"),
    row("div.Tensor_mode", F, G, rounding_mode="trunc"),
    row("div.Tensor_mode", F, G, rounding_mode="floor"),
    row("div.Tensor_mode", INTS, 2, rounding_mode="trunc"),
    row("remainder.Tensor", INTS, DIVISORS),
    row("remainder.Tensor", F, G),
    row("remainder.Scalar", F, 2),
    row("fmod.Tensor", INTS, DIVISORS),
    row("fmod.Tensor", F, G),
    row("floor_divide.default", F, G),
    row("floor_divide.default", INTS, DIVISORS),
    row("pow.Tensor_Scalar", F, 2),
    row("pow.Tensor_Scalar", F, 3),
    row("pow.Tensor_Scalar", F, 2.0),
    row("pow.Tensor_Scalar", G, -0.5),
    row("pow.Tensor_Scalar", F, 0.5),
    row("pow.Tensor_Scalar", INTS, 2),
    row("pow.Tensor_Scalar", INTS, 2.5),
    row("pow.Tensor_Tensor", F, G),
    row("pow.Tensor_Tensor", G.abs(), F),
    row("pow.Scalar", 2, F),
    row("pow.Scalar", 2.0, INTS),
    row("pow.Tensor_Scalar", F, 0),
    row("pow.Tensor_Scalar", F, -2),
    row("maximum.default", F, G),
    row("minimum.default", F, G),
    row("maximum.default", INTS, DIVISORS),
    row("eq.Tensor", INTS, DIVISORS),
    row("eq.Scalar", F, 0),
    row("ge.Scalar", INTS, 0.5),
    row("lt.Tensor", F, G),
    row("where.self", BOOLS, F, G),
    row("where.self", BOOLS, HALF, tensor(1.0)),
    row("where.ScalarOther", BOOLS, F, 0),
    row("where.ScalarOther", BOOLS, INTS, 0.5),
    row("where.Scalar", BOOLS, 1.0, 0.0),
    row("where.Scalar", BOOLS, 1, 0),
    row("bitwise_and.Tensor", BOOLS, BOOLS),
    row("bitwise_not.default", BOOLS),
    row("logical_and.default", INTS, BOOLS),
    row("logical_not.default", F),
    row("_to_copy.default", F, dtype=torch.int64),
    row("_to_copy.default", INTS, dtype=torch.float32),
    row("_to_copy.default", BOOLS, dtype=torch.float16),
    row("_to_copy.default", X[:2, :4], dtype=torch.bool),
    row("hardtanh.default", tensor([-1.0, 0.0, 1.0, 2.0, -3.0])),
    row("hardtanh.default", tensor([-1.0, 0.0, 1.0, 2.0, -3.0]), 0.0, 2.0),
    row("relu6.default", tensor([0.0, 6.0, 7.0, 3.0])),
    row("hardswish.default", tensor([-3.0, 3.0, 0.0, 1.0, 5.0, -5.0])),
    row("hardshrink.default", X),
    row("softshrink.default", X),
    row("softshrink.default", X, 1.0),
    row("threshold.default", X, 0.5, 20.0),
    row("celu.default", X[0], 0.5),
    row("_prelu_kernel.default", X[0], tensor([0.2])),
    row("logit.default", tensor([0.1, 0.5, 0.2, 0.9]), 0.2),
    row("nan_to_num.default", X),
    row("nan_to_num.default", X, 1.0, 2.0, 3.0),
    row("nan_to_num.default", X, posinf=5.0),
    row("isclose.default", F, G),
    row("isclose.default", F, F + 1e-09),
    row("isclose.default", X, X, equal_nan=True),
    row("lerp.Scalar", F, G, 0.3),
    row("lerp.Tensor", F, G, G),
    row("addcmul.default", F, G, G),
    row("addcmul.default", F, G, G, value=0.5),
    row("addcdiv.default", F, G, G, value=2),
    row("atan2.default", F, G),
    row("hypot.default", F, G),
    row("logaddexp.default", F, G),
    row("logaddexp2.default", F, G),
    row("heaviside.default", F, tensor(0.5)),
    row("heaviside.default", X, tensor(0.5)),
    row("heaviside.default", INTS, INTS),
    row("sign.default", X),
    row("sign.default", BOOLS),
    row("copysign.Scalar", INTS, 2),
    row("copysign.Tensor", BOOLS, BOOLS),
    # The slope of XLA's digamma is right up to 1e-11.
    row("digamma.default", tensor([-2.5, -0.3, 0.2, 3.0]), roundoff=FLOAT32),
    row("digamma.default", tensor([0, -1, 2])),
    row("xlogy.Scalar_Self", 2, G.abs()),
    row("xlogy.Scalar_Other", F, 2),
    row("special_xlogy.default", G, DIVISORS.abs()),
    row("hardtanh.default", INTS),
    row("hardtanh.default", INTS, -0.5, 2.5),
    row("complex.default", F, G[0]),
    row("gcd.default", INTS, DIVISORS),
    row("lcm.default", INTS, DIVISORS),
    row("copysign.Tensor", F, G),
    row("copysign.Scalar", G, -1.0),
    row("fmax.default", F, G),
    row("fmin.default", X[:2], X[1:]),
    row("fmax.default", X[:2], X[1:]),
    row("xlogy.Tensor", F.abs(), G.abs()),
    row("xlogy.Scalar_Other", F, 2.0),
    row("xlogy.Scalar_Self", 2.0, G.abs()),
    row("float_power.Tensor_Scalar", INTS, 2),
    row("float_power.Tensor_Tensor", F, G),
    row("bitwise_left_shift.Tensor", INTS, DIVISORS.abs()),
    row("__rshift__.Scalar", INTS, 1),
    row("bitwise_or.Scalar", INTS, 4),
    row("__and__.Tensor", BOOLS, BOOLS),
    row("bitwise_xor.Tensor", INTS, DIVISORS),
    row("real.default", COMPLEX),
    row("imag.default", COMPLEX),
    row("view_as_real.default", COMPLEX),
    row("view_as_complex.default", torch.stack([F, G], -1)),
    row("complex.default", F, G),
    row("_conj.default", COMPLEX),
    row("mul.Tensor", COMPLEX, COMPLEX),
    row("angle.default", COMPLEX),
    row("abs.default", COMPLEX),
    row("type_as.default", F, INTS),
    row("round.decimals", X[0] * 1.237, decimals=1),
    row("round.default", tensor([0.5, 1.5, 2.5, -0.5])),
    row("clip.default", F, 0, 1),
    row("div.Tensor", BOOLS, BOOLS),
    row("floor_divide.Scalar", INTS, 2),
    row("sub.Tensor", tensor(1), tensor(0.5)),
    row("mul.Tensor", HALF, INTS),
    row("exp.default", SCALAR),
    row("add.Tensor", HALF.bfloat16(), tensor(0.5)),
    row("mul.Tensor", INTS.to(torch.uint8), 2),
    row("mul.Tensor", INTS.to(torch.int8), INTS.to(torch.uint8)),
    row("bitwise_not.default", INTS),
    row("gelu.default", HALF),
    row("clamp.default", HALF, 0, 1),
    row("hardtanh.default", HALF),
    row("leaky_relu.default", HALF, 0.1),
    row("softshrink.default", HALF),
    row("hardswish.default", HALF.bfloat16()),
    row("nan_to_num.default", HALF),
    row("celu.default", HALF),
    row("elu.default", HALF),
    row("threshold.default", HALF, 0, 1.0),
    row("pow.Tensor_Scalar", HALF, 1.7),
    row("rsub.Scalar", HALF, 1.0),
    row("lerp.Scalar", HALF, HALF, 0.5),
    row("addcmul.default", HALF, HALF, HALF),
    row("logit.default", HALF, 0.1),
    row("where.ScalarSelf", BOOLS, 1.0, HALF),
    row("abs.default", HALF),
    row("sin.default", INTS),
    row("angle.default", COMPLEX),
    row("polar.default", G.abs(), F),
    *rows(
        "abs ceil cos erf exp floor isinf isnan log_sigmoid mish neg relu round selu sigmoid "
        "silu sin square tanh trunc hardshrink frac",
        X,
    ),
    *rows(
        "acos asin atanh erfinv logit special_ndtri",
        UNIT,
    ),
    *rows(
        "sign celu hardtanh relu6 hardswish softshrink gelu elu atan asinh sinh cosh tan sinc "
        "special_entr erfc special_erf special_log_ndtr special_ndtr i0 special_i1 exp2 expm1 "
        "deg2rad isposinf signbit",
        KINKS,
    ),
    *rows(
        "acosh log log2 log10 log1p sqrt lgamma rsqrt reciprocal",
        UNIT + 1,
    ),
    *rows(
        "sin exp erf sigmoid reciprocal abs ceil round trunc floor tanh square sign",
        INTS,
    ),
    row("digamma.default", tensor([1, 2, 5])),
    # Within, torch's backward multiplies by 1/6 in float32.
    row("hardsigmoid.default", tensor([-3.0, 3.0, 5.0, -5.0])),
    *[
        row(f"{name}.{kind}", F, other)
        for name in ["eq", "ne", "lt", "le", "gt", "ge"]
        for kind, other in (("Tensor", G), ("Scalar", 2))
    ],
]

TEXTS = [
    row("add.Tensor", F, G, text="x0 + x1"),
    row("add.Tensor", F, G, alpha=2, text="x0 + 2 * x1"),
    row("add.Tensor", HALF, tensor(2.0), text="x0 + x1.astype(jnp.float16)"),
    row("mul.Tensor", F, 0.125, text="x0 * 0.125"),
    row("mul.Tensor", INTS, 0.5, text="x0.astype(jnp.float32) * 0.5"),
    row("rsub.Scalar", F, 1.0, text="1.0 - x0"),
    row("pow.Tensor_Scalar", F, 2, text="jnp.square(x0)"),
    row("pow.Tensor_Scalar", F, 3.0, text="x0 ** 3"),
    row("gelu.default", F, text="jax.nn.gelu(x0, approximate=False)"),
    row("gelu.default", F, approximate="tanh", text="jax.nn.gelu(x0)"),
    row("softplus.default", F, text="jax.nn.softplus(x0)"),
    row("clamp.default", INTS, 0, 5, text="jnp.clip(x0, 0, 5)"),
    row("clamp.default", F, None, 5.0, text="clamp(x0, None, 5.0)"),
    row("_to_copy.default", F, dtype=torch.bfloat16, text="x0.astype(jnp.bfloat16)"),
    row("_to_copy.default", F, dtype=torch.float32, text="x0"),
    row(
        "prelu.default",
        BTD,
        tensor([0.1, 0.2, 0.3]),
        text="jnp.where(x0 > 0, x0, x1[:, None] * x0)",
    ),
]

MISTAKES = [
    row("abs.default", F, wrong="jnp.abs(self)"),  # gradient 1 at 0
    row("clamp.default", X, 0.0, wrong="jnp.clip(self, min, max)"),  # gradient 1/2 at 0
    row("hardtanh.default", KINKS, wrong="clamp(self, min_val, max_val)"),  # gradient 1 at 1
    row(
        "leaky_relu.default", F, 0.1, wrong="jax.nn.leaky_relu(self, negative_slope)"
    ),  # gradient 1 at 0
    row("gelu.default", F, wrong="jax.nn.gelu(self)"),
    row("remainder.Tensor", INTS, DIVISORS, wrong="jnp.fmod(self, other)"),
    row("div.Tensor_mode", INTS, DIVISORS, rounding_mode="trunc", wrong="self // other"),
    row("add.Tensor", HALF, SCALAR, wrong="self + other"),  # float32
    row("mul.Tensor", INTS, 1.5, wrong="self * other"),  # a weak dtype
    row("round.default", tensor([0.5, 1.5, 2.5]), wrong="jnp.floor(self + 0.5)"),
    row("fmax.default", F, G, wrong="jnp.maximum(self, other)"),
    row("addcmul.default", F, G, G, value=0.5, wrong="self + tensor1 * tensor2"),
]


def drawn():
    """Operands of shapes that broadcast, and of any two dtypes."""
    rng = random.Random(1)
    kinds = {"maximum": "default", "atan2": "default", "where": "self", "pow": "Tensor_Tensor"}
    for name in ("add", "mul", "div", "maximum", "atan2", "where", "pow", "remainder"):
        for dtype in (torch.float32, torch.float16, torch.int64):
            shape = [rng.randint(1, 3) for _ in range(rng.randint(0, 3))]
            other = [rng.choice([1, size]) for size in shape][rng.randint(0, 3) :]
            values = torch.arange(1.0, 1.0 + torch.Size(shape).numel()).reshape(shape)
            condition = [values > 2] if name == "where" else []
            second = (torch.ones(other) * 2).to(dtype)
            yield row(f"{name}.{kinds.get(name, 'Tensor')}", *condition, values, second)


@table(ROWS, TEXTS, drawn(), MISTAKES)
def test_values_gradients_and_dtypes_are_those_of_torch(row):
    row.check()


@pytest.mark.parametrize(("name", "tensor"), [("angle", F), ("sgn", COMPLEX)])
def test_what_has_no_equal_is_refused(name, tensor):
    with pytest.raises(NotImplementedError):
        written(f"{name}.default", tensor)
