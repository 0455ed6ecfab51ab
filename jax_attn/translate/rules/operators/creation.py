"""Write operators that make tensors."""

from typing import Any

from jax_attn.translate.rules.calls import call
from jax_attn.translate.rules.rule import Array, Rule


def arange(out: Array, end: Any, start: Any = 0, step: Any = 1) -> str:
    if "int" in out.dtype and any(isinstance(x, float) for x in (start, end, step)):
        # torch counts in whole numbers then.
        whole = ", ".join(str(int(x)) for x in (start, end, step))
        return f"jnp.arange({whole}, dtype=jnp.{out.dtype})"
    inferred = "float32" if any(isinstance(x, float) for x in (start, end, step)) else "int32"
    limits = ["end"] if start == 0 and step == 1 else ["start", "end"]
    dtype = None if inferred == out.dtype else f"jnp.{out.dtype}"
    return call("jnp.arange", *limits, None if step == 1 else "step", dtype=dtype)


def _filled(size: str, value: Any, dtype: str, is_default: bool) -> str:
    function = {0: "jnp.zeros", 1: "jnp.ones"}.get(value) if not isinstance(value, bool) else None
    if function:
        return call(function, size, dtype=None if is_default else dtype)
    return call("jnp.full", size, "fill_value", dtype=dtype)


def made(value: Any) -> Any:
    """Make the rule of a tensor of one number."""

    def rule(out: Array, fill_value: Any = value) -> str:
        return _filled("size", fill_value, f"jnp.{out.dtype}", out.dtype == "float32")

    return rule


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


def linspace(start: Any, end: Any, out: Array) -> str:
    if not out.is_floating:
        raise NotImplementedError("linspace of integers, which torch rounds in its own way")
    tensors = any(isinstance(each, Array) for each in (start, end))
    dtype = f"jnp.{out.dtype}" if tensors or out.dtype != "float32" else None
    return call("jnp.linspace", "start", "end", "steps", dtype=dtype)


def eye(out: Array, m: Any = None) -> str:
    dtype = None if out.dtype == "float32" else f"jnp.{out.dtype}"
    return call("jnp.eye", "n", None if m is None else "m", dtype=dtype)


def triangle_indices(function: str) -> Any:
    def rule(row: Any, col: Any, offset: int) -> str:
        width = None if row == col else "col"
        return f"jnp.array({call(function, 'row', str(offset) if offset else None, m=width)})"

    return rule


def window(function: str) -> Any:
    """Make the rule of a window; a periodic one is one longer, without its last value."""

    def rule(out: Array, window_length: Any, periodic: bool = True) -> str:
        if window_length == 1:
            return f"jnp.ones(1, dtype=jnp.{out.dtype})"
        value = f"{function}(window_length + 1)[:-1]" if periodic else f"{function}(window_length)"
        return f"{value}.astype(jnp.{out.dtype})"

    return rule


CREATION: dict[str, Rule] = {
    "aten.arange.default": arange,
    "aten.arange.start": arange,
    "aten.arange.start_step": arange,
    "aten.full.default": made(None),
    "aten.zeros.default": made(0),
    "aten.empty.memory_format": made(0),
    "aten.ones.default": made(1),
    "aten.new_zeros.default": new(0),
    "aten.new_empty.default": new(0),
    "aten.new_ones.default": new(1),
    "aten.new_full.default": new(None),
    "aten.full_like.default": like("jnp.full_like"),
    "aten.zeros_like.default": like("jnp.zeros_like"),
    "aten.empty_like.default": like("jnp.zeros_like"),
    "aten.ones_like.default": like("jnp.ones_like"),
    "aten.empty_strided.default": made(0),
    "aten.empty_permuted.default": made(0),
    "aten.new_empty_strided.default": new(0),
    "aten.scalar_tensor.default": scalar,
    "aten.linspace.default": linspace,
    "aten.linspace.Tensor_Tensor": linspace,
    "aten.linspace.Tensor_Scalar": linspace,
    "aten.linspace.Scalar_Tensor": linspace,
    "aten.eye.default": eye,
    "aten.eye.m": eye,
    "aten.tril_indices.default": triangle_indices("jnp.tril_indices"),
    "aten.triu_indices.default": triangle_indices("jnp.triu_indices"),
    **{
        f"aten.{name}_window.{overload}": window(f"jnp.{function}")
        for name, function in {
            "bartlett": "bartlett",
            "blackman": "blackman",
            "hamming": "hamming",
            "hann": "hanning",
        }.items()
        for overload in ("default", "periodic")
    },
}
