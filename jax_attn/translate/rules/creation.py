"""Operators that make tensors."""

from collections.abc import Sequence
from typing import Any

from jax_attn.translate.rules.operands import call
from jax_attn.translate.rules.rule import Array, Rule


def arange(out: Array, end: Any, start: Any = 0, step: Any = 1) -> str:
    inferred = "float32" if any(isinstance(x, float) for x in (start, end, step)) else "int32"
    limits = ["end"] if start == 0 and step == 1 else ["start", "end"]
    dtype = None if inferred == out.dtype else f"jnp.{out.dtype}"
    return call("jnp.arange", *limits, None if step == 1 else "step", dtype=dtype)


def _filled(size: str, value: Any, dtype: str, is_default: bool) -> str:
    function = {0: "jnp.zeros", 1: "jnp.ones"}.get(value) if not isinstance(value, bool) else None
    if function:
        return call(function, size, dtype=None if is_default else dtype)
    return call("jnp.full", size, "fill_value", dtype=dtype)


def full(size: Sequence[Any], fill_value: Any, out: Array) -> str:
    return _filled("size", fill_value, f"jnp.{out.dtype}", out.dtype == "float32")


def zeros(out: Array) -> str:
    return _filled("size", 0, f"jnp.{out.dtype}", out.dtype == "float32")


def ones(out: Array) -> str:
    return _filled("size", 1, f"jnp.{out.dtype}", out.dtype == "float32")


def new(value: Any) -> Any:
    def rule(self: Array, out: Array, fill_value: Any = value) -> str:
        dtype = "self.dtype" if self.dtype == out.dtype else f"jnp.{out.dtype}"
        return _filled("size", fill_value, dtype, is_default=False)

    return rule


def like(function: str) -> Any:
    def rule(self: Array, out: Array, fill_value: Any = None) -> str:
        dtype = None if self.dtype == out.dtype else f"jnp.{out.dtype}"
        return call(function, "self", None if fill_value is None else "fill_value", dtype=dtype)

    return rule


def scalar(out: Array) -> str:
    return f"jnp.array(s, dtype=jnp.{out.dtype})"


CREATION: dict[str, Rule] = {
    "aten.arange.default": arange,
    "aten.arange.start": arange,
    "aten.arange.start_step": arange,
    "aten.full.default": full,
    "aten.zeros.default": zeros,
    "aten.empty.memory_format": zeros,
    "aten.ones.default": ones,
    "aten.new_zeros.default": new(0),
    "aten.new_empty.default": new(0),
    "aten.new_ones.default": new(1),
    "aten.new_full.default": new(None),
    "aten.full_like.default": like("jnp.full_like"),
    "aten.zeros_like.default": like("jnp.zeros_like"),
    "aten.empty_like.default": like("jnp.zeros_like"),
    "aten.ones_like.default": like("jnp.ones_like"),
    "aten.scalar_tensor.default": scalar,
}
