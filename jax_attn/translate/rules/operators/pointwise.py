"""Write operators that treat each element alike."""

from typing import Any

from jax_attn.translate.rules.calls import call
from jax_attn.translate.rules.operands import (
    as_dtype,
    binary,
    both,
    in_float32,
    in_floats,
    promoted,
    replaced,
)
from jax_attn.translate.rules.rule import Array, Rule


def _scaled(sign: str, first: str, second: str) -> Any:
    def rule(self: Any, other: Any, alpha: Any) -> str:
        scaled = second if alpha == 1 else f"alpha * {second}"
        return promoted(f"{first} {sign} {scaled}", {"self": self, "other": other})

    return rule


def absolute(self: Array) -> str:
    # At 0, the gradient of `jnp.abs` is 1, torch's is 0.
    return "absolute(self)" if self.is_floating else "jnp.abs(self)"


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
            return replaced(power(out, exponent, out), self=as_dtype("self", out.dtype))
        if exponent in POWERS:
            return POWERS[exponent]
        return f"self**{int(exponent)}" if exponent == int(exponent) else "self**exponent"
    return promoted("self**exponent", {"self": self, "exponent": exponent}, out.dtype)


def _cast(template: str, operands: dict[str, Any], dtype: str) -> str:
    """Write what takes operands of one dtype only, numbers too."""
    casts = {
        name: as_dtype(name, dtype) if isinstance(each, Array) else f"jnp.{dtype}({name})"
        for name, each in operands.items()
        if not (isinstance(each, Array) and each.dtype == dtype)
    }
    return replaced(template, **casts)


def division(self: Any, other: Any, out: Array, rounding_mode: str | None = None) -> str:
    if rounding_mode is None:
        return promoted("self / other", {"self": self, "other": other}, out.dtype)
    if rounding_mode == "floor":
        return promoted("self // other", {"self": self, "other": other})
    if out.is_floating:
        return promoted("jnp.trunc(self / other)", {"self": self, "other": other})
    return _cast("jax.lax.div(self, other)", {"self": self, "other": other}, out.dtype)


def clamp(self: Array, out: Array, min: Any = None, max: Any = None) -> str:
    limits = {name: each for name, each in (("min", min), ("max", max)) if each is not None}
    spelled = ["self", "None" if min is None else "min", None if max is None else "max"]
    # At a limit, the gradient of `jnp.clip` is a half.
    value = call("clamp" if out.is_floating else "jnp.clip", *spelled)
    return promoted(value, {"self": self, **limits}, out.dtype)


def where(condition: Array, self: Any, other: Any, out: Array) -> str:
    return promoted("jnp.where(condition, self, other)", {"self": self, "other": other}, out.dtype)


def xlogy(self: Any, other: Any, out: Array) -> str:
    template = "jax.scipy.special.xlogy(self, other)"
    return _cast(template, {"self": self, "other": other}, out.dtype)


def lerp(self: Array, end: Array, weight: Any) -> str:
    return promoted("self + weight * (end - self)", {"self": self, "end": end, "weight": weight})


def addc(sign: str) -> Any:
    """Make the rule of `self + value * (tensor1 sign tensor2)`."""

    def rule(self: Array, tensor1: Array, tensor2: Array, value: Any) -> str:
        scaled = "tensor1" if value == 1 else "value * tensor1"
        given = {"self": self, "tensor1": tensor1, "tensor2": tensor2, "value": value}
        return promoted(f"self + {scaled} {sign} tensor2", given)

    return rule


def logit(eps: float | None) -> str:
    limited = "self" if eps is None else "clamp(self, eps, 1 - eps)"
    return f"jax.scipy.special.logit({limited})"


def nan_to_num(nan: Any, posinf: Any, neginf: Any) -> str:
    given = {"nan": nan or None, "posinf": posinf, "neginf": neginf}
    return call("jnp.nan_to_num", "self", **{k: k for k, v in given.items() if v is not None})


def close(rtol: float, atol: float, equal_nan: bool) -> str:
    return call("jnp.isclose", "self", "other", "rtol", "atol", equal_nan=equal_nan or None)


def angle(self: Array) -> str:
    if self.dtype.startswith("complex"):
        return "jnp.angle(self)"
    raise NotImplementedError("the angle of a real tensor")


def sign(self: Array) -> str:
    if self.dtype.startswith("complex"):
        raise NotImplementedError("the sign of a complex number, of which JAX has no gradient")
    if self.is_floating:  # torch has 0 for NaN.
        return "jnp.nan_to_num(jnp.sign(self))"
    return "self" if self.dtype == "bool" else "jnp.sign(self)"


def copysign(self: Array, other: Any, out: Array) -> str:
    value = "absolute(self) * jnp.copysign(1, other)"
    return promoted(value, {"self": self, "other": other}, out.dtype)


def joined(real: Array, imag: Array) -> str:
    same = real.shape == imag.shape
    return f"jax.lax.complex({'real, imag' if same else '*jnp.broadcast_arrays(real, imag)'})"


def to_copy(self: Array, out: Array) -> str:
    if self.dtype == out.dtype:
        return "self"
    if self.dtype.startswith("complex") and not out.dtype.startswith("complex"):
        raise NotImplementedError("a complex tensor is cast to a real one")
    return f"self.astype(jnp.{out.dtype})"


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
        "rad2deg": "rad2deg",
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
    **both("add", _scaled("+", "self", "other")),
    **both("sub", _scaled("-", "self", "other")),
    **both("subtract", _scaled("-", "self", "other")),
    **both("rsub", _scaled("-", "other", "self")),
    **both("mul", binary("self * other")),
    **both("multiply", binary("self * other")),
    **both("div", division),
    **both("div", division, "Tensor_mode", "Scalar_mode"),
    **both("divide", division),
    **both("divide", division, "Tensor_mode", "Scalar_mode"),
    **both("true_divide", division),
    **both("floor_divide", binary("self // other"), "default", "Scalar"),
    **both("remainder", binary("self % other"), "Tensor", "Scalar", "Scalar_Tensor"),
    **both("fmod", binary("jnp.fmod(self, other)")),
    **both("pow", power, "Tensor_Scalar", "Tensor_Tensor"),
    **both("pow", power, "Scalar"),
    **both("maximum", binary("jnp.maximum(self, other)"), "default"),
    **both("minimum", binary("jnp.minimum(self, other)"), "default"),
    **both("max", binary("jnp.maximum(self, other)"), "other"),
    **both("min", binary("jnp.minimum(self, other)"), "other"),
    "aten.abs.default": absolute,
    "aten.absolute.default": absolute,
    "aten.sign.default": sign,
    "aten.sgn.default": sign,
    "aten.neg.default": "-self",
    "aten.negative.default": "-self",
    "aten.positive.default": "self",
    "aten.reciprocal.default": in_floats("1 / self"),
    "aten.rsqrt.default": in_floats("jax.lax.rsqrt(self)"),
    "aten.erf.default": in_floats("jax.lax.erf(self)"),
    "aten.ceil.default": whole("jnp.ceil"),
    "aten.floor.default": whole("jnp.floor"),
    "aten.trunc.default": whole("jnp.trunc"),
    "aten.round.default": rounded,
    "aten.round.decimals": rounded,
    "aten.clamp.default": clamp,
    "aten.clamp.Tensor": clamp,
    "aten.clamp_min.default": clamp,
    "aten.clamp_min.Tensor": clamp,
    "aten.clamp_max.default": clamp,
    "aten.clamp_max.Tensor": clamp,
    **both("where", where, "self", "ScalarSelf", "ScalarOther", "Scalar"),
    "aten._to_copy.default": to_copy,
    "aten.type_as.default": to_copy,
    **both("lerp", lerp),
    **both("clip", clamp, "default", "Tensor"),
    **both("float_power", power, "Tensor_Scalar", "Tensor_Tensor", "Scalar"),
    **{
        f"aten.{name}.default": binary(f"jnp.{function}(self, other)")
        for name, function in {
            "arctan2": "arctan2",
            "atan2": "arctan2",
            "gcd": "gcd",
            "hypot": "hypot",
            "lcm": "lcm",
            "logaddexp": "logaddexp",
            "logaddexp2": "logaddexp2",
            "nextafter": "nextafter",
        }.items()
    },
    "aten.heaviside.default": "jnp.where(self == 0, values, self > 0)",
    **both("copysign", copysign),
    "aten.fmax.default": binary("jnp.where((self >= other) | jnp.isnan(other), self, other)"),
    "aten.fmin.default": binary("jnp.where((self <= other) | jnp.isnan(other), self, other)"),
    **both("xlogy", xlogy, "Tensor", "Scalar_Self", "Scalar_Other"),
    **both("special_xlogy", xlogy, "default", "self_scalar", "other_scalar"),
    **{
        f"aten.{each}.default": in_floats(f"jax.scipy.special.{function}(self)")
        for function, names in {
            "entr": "special_entr",
            "erf": "special_erf",
            "erfc": "erfc special_erfc",
            "erfinv": "erfinv special_erfinv",
            "gammaln": "lgamma special_gammaln",
            "i0e": "special_i0e",
            "i1": "special_i1",
            "i1e": "special_i1e",
        }.items()
        for each in names.split()
    },
    "aten.digamma.default": in_floats("digamma(self)"),
    "aten.special_digamma.default": in_floats("digamma(self)"),
    "aten.special_psi.default": in_floats("digamma(self)"),
    **{
        f"aten.special_{each}.default": in_float32(f"jax.scipy.special.{each}(self)")
        for each in ("log_ndtr", "ndtr", "ndtri")
    },
    "aten.addcmul.default": addc("*"),
    "aten.addcdiv.default": addc("/"),
    "aten.frac.default": "self - jnp.trunc(self)",
    "aten.logit.default": logit,
    "aten.special_logit.default": logit,
    "aten.nan_to_num.default": nan_to_num,
    "aten.isclose.default": close,
    "aten.real.default": "self.real",
    "aten.imag.default": "self.imag",
    "aten.view_as_real.default": "jnp.stack([self.real, self.imag], axis=-1)",
    "aten.view_as_complex.default": "jax.lax.complex(self[..., 0], self[..., 1])",
    "aten.complex.default": joined,
    "aten.polar.default": "abs * jnp.exp(1j * angle)",
    "aten.i0.default": in_floats("jnp.exp(absolute(self)) * jax.scipy.special.i0e(self)"),
    "aten.angle.default": angle,
    "aten._conj.default": "self.conj()",
    "aten.conj_physical.default": "self.conj()",
}
