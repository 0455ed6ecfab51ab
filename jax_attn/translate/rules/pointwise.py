"""Operators that treat each element alike."""

from typing import Any

from jax_attn.translate.rules.operands import binary, call, cast, in_floats, promoted, replaced
from jax_attn.translate.rules.rule import Array, Rule


def _scaled(sign: str, first: str, second: str) -> Any:
    def rule(self: Any, other: Any, alpha: Any) -> str:
        scaled = second if alpha == 1 else f"alpha * {second}"
        return promoted(f"{first} {sign} {scaled}", {"self": self, "other": other})

    return rule


def absolute(self: Array) -> str:
    # At 0, the gradient of `jnp.abs` is 1, torch's is 0.
    return "self * jnp.sign(self)" if self.is_floating else "jnp.abs(self)"


def whole(function: str) -> Any:
    """Make the rule of a rounding, which leaves integers alone."""

    def rule(self: Array) -> str:
        return f"{function}(self)" if self.is_floating else "self"

    return rule


def rounded(self: Array, decimals: int = 0) -> str:
    if not self.is_floating:
        return "self"
    return f"jnp.round(self, {decimals})" if decimals else "jnp.round(self)"


POWERS = {
    2: "jnp.square(self)",
    1: "self",
    0.5: "jnp.sqrt(self)",
    -0.5: "jax.lax.rsqrt(self)",
    -1: "1 / self",
}


def power(self: Array, exponent: Any, out: Array) -> str:
    if isinstance(exponent, (int, float)):
        if self.dtype != out.dtype:
            return replaced(power(out, exponent, out), self=cast("self", out.dtype))
        if exponent in POWERS:
            return POWERS[exponent]
        return f"self**{int(exponent)}" if exponent == int(exponent) else "self**exponent"
    return promoted("self**exponent", {"self": self, "exponent": exponent}, out.dtype)


def division(self: Any, other: Any, rounding_mode: str | None, out: Array) -> str:
    if rounding_mode is None:
        return promoted("self / other", {"self": self, "other": other}, out.dtype)
    if rounding_mode == "floor":
        return promoted("self // other", {"self": self, "other": other})
    if out.is_floating:
        return promoted("jnp.trunc(self / other)", {"self": self, "other": other})
    both = {"self": self, "other": other}
    casts = {
        name: cast(name, out.dtype) if isinstance(each, Array) else f"jnp.{out.dtype}({name})"
        for name, each in both.items()
        if not (isinstance(each, Array) and each.dtype == out.dtype)
    }
    return replaced("jax.lax.div(self, other)", **casts)


def divided(self: Any, other: Any, out: Array) -> str:
    return division(self, other, None, out)


def gelu(approximate: str) -> str:
    return "jax.nn.gelu(self)" if approximate == "tanh" else "jax.nn.gelu(self, approximate=False)"


def softplus(beta: float, threshold: float) -> str:
    value = "jax.nn.softplus(self)" if beta == 1 else "jax.nn.softplus(beta * self) / beta"
    if threshold >= 17:  # Above it, what softplus adds to its argument is lost in float32.
        return value
    scaled = "self" if beta == 1 else "beta * self"
    return f"jnp.where({scaled} > threshold, self, {value})"


def elu(alpha: float, scale: float, input_scale: float) -> str:
    if input_scale != 1:
        value = "jnp.where(self > 0, self, alpha * jnp.expm1(input_scale * jnp.where(self > 0, 0, self)))"
    else:
        value = "jax.nn.elu(self)" if alpha == 1 else "jax.nn.elu(self, alpha)"
    return value if scale == 1 else f"scale * {value}"


def clamp(self: Array, min: Any, max: Any, out: Array) -> str:
    limits = {name: each for name, each in (("min", min), ("max", max)) if each is not None}
    spelled = ["self", "None" if min is None else "min", None if max is None else "max"]
    # At a limit, the gradient of `jnp.clip` is a half.
    value = call("clamp" if out.is_floating else "jnp.clip", *spelled)
    return promoted(value, {"self": self, **limits}, out.dtype)


def clamp_min(self: Array, min: Any, out: Array) -> str:
    return clamp(self, min, None, out)


def clamp_max(self: Array, max: Any, out: Array) -> str:
    return clamp(self, None, max, out)


def where(condition: Array, self: Any, other: Any, out: Array) -> str:
    return promoted("jnp.where(condition, self, other)", {"self": self, "other": other}, out.dtype)


def masked_fill(self: Array, mask: Array, value: Any, out: Array) -> str:
    return promoted("jnp.where(mask, value, self)", {"self": self, "value": value}, out.dtype)


def prelu(self: Array, weight: Array) -> str:
    slope = "weight"
    if weight.rank == 1 and self.rank > 2 and weight.shape != (1,):
        slope = f"weight[:{', None' * (self.rank - 2)}]"
    return f"jnp.where(self > 0, self, {slope} * self)"


def glu(dim: int, self: Array) -> str:
    return "jax.nn.glu(self)" if dim in (-1, self.rank - 1) else f"jax.nn.glu(self, axis={dim})"


def to_copy(self: Array, out: Array) -> str:
    if self.dtype == out.dtype:
        return "self"
    if self.dtype.startswith("complex") and not out.dtype.startswith("complex"):
        raise NotImplementedError("a complex tensor is cast to a real one")
    return f"self.astype(jnp.{out.dtype})"


def _both(name: str, rule: Rule, *overloads: str) -> dict[str, Rule]:
    return {f"aten.{name}.{overload}": rule for overload in overloads or ("Tensor", "Scalar")}


SIMPLE: dict[str, Rule] = {
    name: f"jnp.{function}(self)"
    for function, names in {
        "arccos": "acos arccos",
        "arccosh": "acosh arccosh",
        "arcsin": "asin arcsin",
        "arcsinh": "asinh arcsinh",
        "arctan": "atan arctan",
        "arctanh": "atanh arctanh",
        "cos": "cos",
        "cosh": "cosh",
        "deg2rad": "deg2rad",
        "exp": "exp",
        "exp2": "exp2 special_exp2",
        "expm1": "expm1 special_expm1",
        "isfinite": "isfinite",
        "isinf": "isinf",
        "isnan": "isnan",
        "isneginf": "isneginf",
        "isposinf": "isposinf",
        "log": "log",
        "log10": "log10",
        "log1p": "log1p special_log1p",
        "log2": "log2",
        "logical_not": "logical_not",
        "rad2deg": "rad2deg",
        "sign": "sign sgn",
        "signbit": "signbit",
        "sin": "sin",
        "sinc": "sinc special_sinc",
        "sinh": "sinh",
        "sqrt": "sqrt",
        "square": "square",
        "tan": "tan",
        "tanh": "tanh",
    }.items()
    for name in (f"aten.{each}.default" for each in names.split())
}

POINTWISE: dict[str, Rule] = {
    **SIMPLE,
    **_both("add", _scaled("+", "self", "other")),
    **_both("sub", _scaled("-", "self", "other")),
    **_both("subtract", _scaled("-", "self", "other")),
    **_both("rsub", _scaled("-", "other", "self")),
    **_both("mul", binary("self * other")),
    **_both("multiply", binary("self * other")),
    **_both("div", divided),
    **_both("div", division, "Tensor_mode", "Scalar_mode"),
    **_both("divide", divided),
    **_both("divide", division, "Tensor_mode", "Scalar_mode"),
    **_both("true_divide", divided),
    **_both("floor_divide", binary("self // other"), "default", "Scalar"),
    **_both("remainder", binary("self % other"), "Tensor", "Scalar", "Scalar_Tensor"),
    **_both("fmod", binary("jnp.fmod(self, other)")),
    **_both("pow", power, "Tensor_Scalar", "Tensor_Tensor"),
    **_both("pow", power, "Scalar"),
    **_both("maximum", binary("jnp.maximum(self, other)"), "default"),
    **_both("minimum", binary("jnp.minimum(self, other)"), "default"),
    **_both("max", binary("jnp.maximum(self, other)"), "other"),
    **_both("min", binary("jnp.minimum(self, other)"), "other"),
    **{
        name: binary(f"self {sign} other")
        for sign, names in {
            "==": "eq",
            "!=": "ne not_equal",
            "<": "lt less",
            "<=": "le less_equal",
            ">": "gt greater",
            ">=": "ge greater_equal",
        }.items()
        for name in (
            f"aten.{each}.{kind}" for each in names.split() for kind in ("Tensor", "Scalar")
        )
    },
    "aten.abs.default": absolute,
    "aten.absolute.default": absolute,
    "aten.neg.default": "-self",
    "aten.negative.default": "-self",
    "aten.positive.default": "self",
    "aten.reciprocal.default": in_floats("1 / self"),
    "aten.rsqrt.default": in_floats("jax.lax.rsqrt(self)"),
    "aten.erf.default": in_floats("jax.lax.erf(self)"),
    "aten.sigmoid.default": in_floats("jax.nn.sigmoid(self)"),
    "aten.ceil.default": whole("jnp.ceil"),
    "aten.floor.default": whole("jnp.floor"),
    "aten.trunc.default": whole("jnp.trunc"),
    "aten.round.default": rounded,
    "aten.round.decimals": rounded,
    "aten.relu.default": "jax.nn.relu(self)",
    "aten.gelu.default": gelu,
    "aten.silu.default": "jax.nn.silu(self)",
    "aten.mish.default": "jax.nn.mish(self)",
    "aten.softplus.default": softplus,
    "aten.elu.default": elu,
    "aten.selu.default": "jax.nn.selu(self)",
    "aten.glu.default": glu,
    "aten.prelu.default": prelu,
    "aten.log_sigmoid.default": "jax.nn.log_sigmoid(self)",
    "aten.leaky_relu.default": "jnp.where(self > 0, self, negative_slope * self)",
    "aten.clamp.default": clamp,
    "aten.clamp.Tensor": clamp,
    "aten.clamp_min.default": clamp_min,
    "aten.clamp_min.Tensor": clamp_min,
    "aten.clamp_max.default": clamp_max,
    "aten.clamp_max.Tensor": clamp_max,
    **_both("where", where, "self", "ScalarSelf", "ScalarOther", "Scalar"),
    **_both("masked_fill", masked_fill),
    **_both("bitwise_and", binary("self & other")),
    **_both("bitwise_or", binary("self | other")),
    **_both("bitwise_xor", binary("self ^ other")),
    **_both("__and__", binary("self & other")),
    **_both("__or__", binary("self | other")),
    **_both("__xor__", binary("self ^ other")),
    "aten.bitwise_not.default": "~self",
    "aten.logical_and.default": "jnp.logical_and(self, other)",
    "aten.logical_or.default": "jnp.logical_or(self, other)",
    "aten.logical_xor.default": "jnp.logical_xor(self, other)",
    "aten._to_copy.default": to_copy,
}
