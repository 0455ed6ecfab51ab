"""Write operators that reduce axes, or run along one."""

import math
from collections.abc import Callable
from typing import Any

from jax_attn.translate.rules.calls import call
from jax_attn.translate.rules.operands import all_axes, as_dtype, axis, positive, replaced
from jax_attn.translate.rules.rule import Array, Rule


def _jax_sums_in(dtype: str) -> str:
    """Return the dtype of `jnp.sum` of an array of this dtype."""
    return {"bool": "int32", "int8": "int32", "int16": "int32", "uint8": "uint32"}.get(dtype, dtype)


def reduction(function: str, *first: str, gives: Callable[[str], str] = lambda dtype: dtype) -> Any:
    """Make the rule of what takes an axis, `keepdims` and, unless it gives torch's, a dtype.

    gives: JAX's dtype of the result, by that of the operand.
    """

    def rule(self: Array, out: Array, dim: Any = None, keepdim: bool = False) -> str:
        dtype = None if gives(self.dtype) == out.dtype else f"jnp.{out.dtype}"
        where = axis(dim, self.rank)
        return call(function, *first, where, keepdims=keepdim or None, dtype=dtype)

    return rule


def _moments(self: Array, dim: Any, unbiased: Any, correction: Any, keepdim: bool) -> list[str]:
    """Write the variance and the mean."""
    ddof = int(unbiased) if unbiased is not None else 1 if correction is None else correction
    named = range(self.rank) if all_axes(dim, self.rank) else [dim] if isinstance(dim, int) else dim
    sizes = [self.shape[each] for each in named]
    if ddof > 1 and math.prod(each for each in sizes if isinstance(each, int)) <= ddof:
        raise NotImplementedError(f"a variance of as few elements as the correction, {ddof}")
    where = axis(dim, self.rank)
    return [
        call("self.var", where, ddof=ddof or None, keepdims=keepdim or None),
        call("self.mean", where, keepdims=keepdim or None),
    ]


def moments(template: str) -> Any:
    """Make the rule of what is made of `variance` and `average`; several parts are outputs."""

    def rule(
        self: Array,
        dim: Any = None,
        unbiased: Any = None,
        correction: Any = None,
        keepdim: bool = False,
    ) -> str | tuple[str, ...]:
        variance, average = _moments(self, dim, unbiased, correction, keepdim)
        parts = template.replace("variance", variance).replace("average", average).split("; ")
        return tuple(parts) if len(parts) > 1 else parts[0]

    return rule


def norm(order: Any, axes: str | None, keepdim: bool) -> str:
    """Write the norm of a vector, whose gradient is 0 where it is 0."""
    total = {
        0: "(self != 0).sum",
        1: "absolute(self).sum",
        2: "jnp.square(self).sum",
        float("inf"): "absolute(self).max",
        float("-inf"): "absolute(self).min",
    }.get(order)
    if total is None:
        return call("vector_norm", "self", str(order), axes, keepdims=keepdim or None)
    value = call(total, axes, keepdims=keepdim or None)
    return f"safe_sqrt({value})" if order == 2 else value


def vector_norm(
    self: Array,
    out: Array,
    ord: Any = None,
    p: Any = None,
    dim: Any = None,
    keepdim: bool = False,
) -> str:
    order = 2 if ord is None and p is None else p if ord is None else ord
    if isinstance(order, str) or self.dtype.startswith("complex"):
        raise NotImplementedError(f"the norm {order!r} of {self.dtype}")
    value = norm(order, axis(dim, self.rank), keepdim)
    if order == 0:
        return f"{value}.astype(jnp.{out.dtype})"
    if self.dtype == out.dtype:
        return value
    return replaced(value, self=as_dtype("self", out.dtype))


def linalg_norm(
    self: Array, out: Array, ord: Any = None, dim: Any = None, keepdim: bool = False
) -> str:
    axes = [dim] if isinstance(dim, int) else dim
    if ord is not None and (len(axes) if axes else self.rank) != 1:
        raise NotImplementedError(f"the matrix norm {ord}")
    return vector_norm(self, out, ord, None, axes, keepdim)


def matrix_norm(self: Array, out: Array, ord: Any, dim: Any, keepdim: bool) -> str:
    if ord != "fro":
        raise NotImplementedError(f"the matrix norm {ord!r}")
    return vector_norm(self, out, 2, None, dim, keepdim)


def logsumexp(self: Array, dim: Any, keepdim: bool) -> str:
    return call("jax.nn.logsumexp", "self", axis=axis(dim, self.rank), keepdims=keepdim or None)


def along(template: str) -> Any:
    """Make the rule of what runs along `dim`; several parts are outputs."""

    def rule(self: Array, dim: int) -> str | tuple[str, ...]:
        if self.rank == 0 or (self.dtype == "bool" and "running_argmax" in template):
            raise NotImplementedError(f"a tensor of {self.rank} axes, of {self.dtype}")
        parts = template.replace("dim", str(positive(dim, self.rank))).split("; ")
        return tuple(parts) if len(parts) > 1 else parts[0]

    return rule


def running_minimum(self: Array, dim: int) -> str | tuple[str, ...]:
    # The complement of an integer turns the order too, without a limit of its own.
    place = f"running_argmax({'-' if self.is_floating else '~'}self, dim)"
    return along(f"jnp.take_along_axis(self, {place}, dim); {place}")(self, dim)


def extremes(self: Array, dim: Any, keepdim: bool) -> tuple[str, str]:
    where = axis(dim, self.rank)
    return (
        call("self.min", where, keepdims=keepdim or None),
        call("self.max", where, keepdims=keepdim or None),
    )


def counted(self: Array, dim: Any = None) -> str:
    return call("jnp.count_nonzero", "self", axis(dim, self.rank))


def quantile(self: Array, dim: Any, keepdim: bool, interpolation: str) -> str:
    method = None if interpolation == "linear" else f'"{interpolation}"'
    return call("jnp.quantile", "self", "q", axis=dim, method=method, keepdims=keepdim or None)


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
        operand = "self" if self.dtype == out.dtype else as_dtype("self", out.dtype)
        if self.rank == 0:
            return f"{function}({operand}, axis=())"
        last = dim in (-1, self.rank - 1)
        return call(function, operand, axis=None if last else dim)

    return rule


def cumulative(function: str) -> Any:
    def rule(self: Array, dim: int, out: Array) -> str:
        if self.rank == 0:
            return "self" if self.dtype == out.dtype else as_dtype("self", out.dtype)
        same = self.dtype == out.dtype or (self.dtype == "bool" and out.dtype == "int32")
        return call(function, str(dim), dtype=None if same else f"jnp.{out.dtype}")

    return rule


def truth(name: str) -> Any:
    def rule(self: Array, out: Array, dim: Any = None, keepdim: bool = False) -> str:
        value = call(f"self.{name}", axis(dim, self.rank), keepdims=keepdim or None)
        return value if out.dtype == "bool" else as_dtype(value, out.dtype)

    return rule


REDUCTIONS: dict[str, Rule] = {
    "aten.sum.default": reduction("self.sum", gives=_jax_sums_in),
    "aten.sum.dim_IntList": reduction("self.sum", gives=_jax_sums_in),
    "aten.mean.default": reduction("self.mean"),
    "aten.mean.dim": reduction("self.mean"),
    **{
        f"aten.{name}.{overload}": moments(template)
        for name, template in {
            "var": "variance",
            "std": "safe_sqrt(variance)",
            "var_mean": "variance; average",
            "std_mean": "safe_sqrt(variance); average",
        }.items()
        for overload in ("default", "dim", "correction")
    },
    "aten.prod.default": reduction("self.prod", gives=_jax_sums_in),
    "aten.prod.dim_int": reduction("self.prod", gives=_jax_sums_in),
    "aten.nansum.default": reduction("jnp.nansum", "self"),
    "aten.nanmean.default": reduction("jnp.nanmean", "self"),
    "aten.linalg_vector_norm.default": vector_norm,
    "aten.norm.Scalar": vector_norm,
    "aten.norm.ScalarOpt_dim": vector_norm,
    "aten.norm.ScalarOpt_dtype": vector_norm,
    "aten.norm.ScalarOpt_dim_dtype": vector_norm,
    "aten.frobenius_norm.dim": vector_norm,
    "aten.linalg_norm.default": linalg_norm,
    "aten.linalg_matrix_norm.str_ord": matrix_norm,
    "aten.logsumexp.default": logsumexp,
    "aten.special_logsumexp.default": logsumexp,
    "aten.aminmax.default": extremes,
    "aten.count_nonzero.default": counted,
    "aten.count_nonzero.dim_IntList": counted,
    "aten.cummax.default": along(
        "jnp.take_along_axis(self, running_argmax(self, dim), dim); running_argmax(self, dim)"
    ),
    "aten.cummin.default": running_minimum,
    "aten.logcumsumexp.default": along("jax.lax.cumlogsumexp(self, dim)"),
    "aten.quantile.default": quantile,
    "aten.quantile.scalar": quantile,
    "aten.trace.default": "jnp.trace(self)",
    "aten.amax.default": reduction("self.max"),
    "aten.amin.default": reduction("self.min"),
    "aten.max.default": reduction("self.max"),
    "aten.min.default": reduction("self.min"),
    "aten.max.dim": extreme_at("argmax"),
    "aten.min.dim": extreme_at("argmin"),
    "aten.argmax.default": reduction("self.argmax", gives=lambda _: "int32"),
    "aten.argmin.default": reduction("self.argmin", gives=lambda _: "int32"),
    "aten.softmax.int": softmax("jax.nn.softmax"),
    "aten._softmax.default": softmax("jax.nn.softmax"),
    "aten._safe_softmax.default": softmax("safe_softmax"),
    "aten.log_softmax.int": softmax("jax.nn.log_softmax"),
    "aten._log_softmax.default": softmax("jax.nn.log_softmax"),
    "aten.special_softmax.default": softmax("jax.nn.softmax"),
    "aten.special_log_softmax.default": softmax("jax.nn.log_softmax"),
    "aten.cumsum.default": cumulative("self.cumsum"),
    "aten.cumprod.default": cumulative("self.cumprod"),
    "aten.any.default": truth("any"),
    "aten.any.dim": truth("any"),
    "aten.any.dims": truth("any"),
    "aten.all.default": truth("all"),
    "aten.all.dim": truth("all"),
    "aten.all.dims": truth("all"),
}
