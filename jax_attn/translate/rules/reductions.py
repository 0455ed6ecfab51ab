"""Operators that reduce axes, or run along one."""

from typing import Any

from jax_attn.translate.rules.operands import axis, call, cast
from jax_attn.translate.rules.rule import Array, Rule


def _jax_sums_in(dtype: str) -> str:
    """Return the dtype of `jnp.sum` of an array of this dtype."""
    return {"bool": "int32", "int8": "int32", "int16": "int32", "uint8": "uint32"}.get(dtype, dtype)


def method(name: str) -> Any:
    """Make the rule of a method that takes an axis, `keepdims` and `dtype`, as `sum`."""

    def rule(self: Array, out: Array, dim: Any = None, keepdim: bool = False) -> str:
        same = _jax_sums_in(self.dtype) == out.dtype
        dtype = None if same else f"jnp.{out.dtype}"
        return call(f"self.{name}", axis(dim, self.rank), keepdims=keepdim, dtype=dtype)

    return rule


def mean(self: Array, out: Array, dim: Any = None, keepdim: bool = False) -> str:
    dtype = None if self.dtype == out.dtype else f"jnp.{out.dtype}"
    return call("self.mean", axis(dim, self.rank), keepdims=keepdim, dtype=dtype)


def variance(self: Array, dim: Any, correction: Any, keepdim: bool) -> str:
    ddof = 1 if correction is None else correction
    return call("self.var", axis(dim, self.rank), ddof=ddof or None, keepdims=keepdim)


def extreme(name: str) -> Any:
    def rule(self: Array, dim: Any = None, keepdim: bool = False) -> str:
        return call(f"self.{name}", axis(dim, self.rank), keepdims=keepdim)

    return rule


def extreme_at(name: str) -> Any:
    """Make the rule of a maximum and its index, which alone gets the gradient."""

    def rule(self: Array, dim: int, keepdim: bool) -> tuple[str, str]:
        if self.rank == 0:
            return "self", "jnp.int32(0)"
        at = f"self.{name}({dim}, keepdims=True)"
        value = f"jnp.take_along_axis(self, {at}, {dim})"
        if keepdim:
            return value, at
        return f"{value}.squeeze({dim})", f"self.{name}({dim})"

    return rule


def softmax(function: str) -> Any:
    def rule(self: Array, dim: int, out: Array) -> str:
        operand = "self" if self.dtype == out.dtype else cast("self", out.dtype)
        if self.rank == 0:
            return f"{function}({operand}, axis=())"
        last = dim in (-1, self.rank - 1)
        return call(function, operand, axis=None if last else dim)

    return rule


def cumulative(function: str) -> Any:
    def rule(self: Array, dim: int, out: Array) -> str:
        if self.rank == 0:
            return "self" if self.dtype == out.dtype else cast("self", out.dtype)
        same = self.dtype == out.dtype or self.dtype == "bool" and out.dtype == "int32"
        return call(function, str(dim), dtype=None if same else f"jnp.{out.dtype}")

    return rule


def truth(name: str) -> Any:
    def rule(self: Array, out: Array, dim: Any = None, keepdim: bool = False) -> str:
        value = call(f"self.{name}", axis(dim, self.rank), keepdims=keepdim)
        return value if out.dtype == "bool" else cast(value, out.dtype)

    return rule


REDUCTIONS: dict[str, Rule] = {
    "aten.sum.default": method("sum"),
    "aten.sum.dim_IntList": method("sum"),
    "aten.mean.default": mean,
    "aten.mean.dim": mean,
    "aten.var.correction": variance,
    "aten.amax.default": extreme("max"),
    "aten.amin.default": extreme("min"),
    "aten.max.default": extreme("max"),
    "aten.min.default": extreme("min"),
    "aten.max.dim": extreme_at("argmax"),
    "aten.min.dim": extreme_at("argmin"),
    "aten.argmax.default": extreme("argmax"),
    "aten.argmin.default": extreme("argmin"),
    "aten.softmax.int": softmax("jax.nn.softmax"),
    "aten._softmax.default": softmax("jax.nn.softmax"),
    "aten._safe_softmax.default": softmax("safe_softmax"),
    "aten.log_softmax.int": softmax("jax.nn.log_softmax"),
    "aten._log_softmax.default": softmax("jax.nn.log_softmax"),
    "aten.cumsum.default": cumulative("self.cumsum"),
    "aten.any.default": truth("any"),
    "aten.any.dim": truth("any"),
    "aten.any.dims": truth("any"),
    "aten.all.default": truth("all"),
    "aten.all.dim": truth("all"),
    "aten.all.dims": truth("all"),
}
