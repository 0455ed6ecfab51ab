"""Write activations of `torch.nn.functional`."""

from typing import Any

from jax_attn.translate.rules.calls import number
from jax_attn.translate.rules.operands import in_floats
from jax_attn.translate.rules.rule import Array, Rule


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
        exponent = "input_scale * jnp.where(self > 0, 0, self)"  # It must not overflow.
        value = f"jnp.where(self > 0, self, alpha * jnp.expm1({exponent}))"
    else:
        value = "jax.nn.elu(self)" if alpha == 1 else "jax.nn.elu(self, alpha)"
    return value if scale == 1 else f"scale * {value}"


def hardtanh(self: Array, min_val: Any, max_val: Any) -> str:
    if not self.is_floating:
        return f"hardtanh(self, {number(min_val, self.dtype)}, {number(max_val, self.dtype)})"
    if (min_val, max_val) == (-1, 1):
        return "hardtanh(self)"
    return "hardtanh(self, min_val, max_val)"


def prelu(self: Array, weight: Array) -> str:
    slope = "weight"
    if weight.rank == 1 and self.rank > 2 and weight.shape != (1,):
        slope = f"weight[:{', None' * (self.rank - 2)}]"
    return f"jnp.where(self > 0, self, {slope} * self)"


def glu(dim: int, self: Array) -> str:
    return "jax.nn.glu(self)" if dim in (-1, self.rank - 1) else f"jax.nn.glu(self, axis={dim})"


ACTIVATIONS: dict[str, Rule] = {
    "aten.sigmoid.default": in_floats("jax.nn.sigmoid(self)"),
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
    "aten.celu.default": "jax.nn.celu(self, alpha)",
    "aten.hardtanh.default": hardtanh,
    "aten.relu6.default": "hardtanh(self, 0, 6)",
    "aten.hardswish.default": "self * hardtanh(self + 3, 0, 6) / 6",
    "aten.hardsigmoid.default": "hardtanh(self + 3, 0, 6) / 6",
    "aten.hardshrink.default": "jnp.where(jnp.abs(self) <= lambd, 0, self)",
    "aten.softshrink.default": "self - clamp(self, -lambd, lambd)",
    "aten.threshold.default": "jnp.where(self <= threshold, value, self)",
    "aten._prelu_kernel.default": "jnp.where(self > 0, self, weight * self)",
    "aten.special_expit.default": in_floats("jax.nn.sigmoid(self)"),
}
