"""Feed-forward layers of a block."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jax_attn.families.traits import MLPTraits, SwigluTraits
from jax_attn.nn.projection import Projection, torch_linear_init

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "tanh": jnp.tanh,
}
"""Activation functions, by their names in traits."""


def activated(x: Float[Array, "*rows F"], name: str) -> Float[Array, "*rows F"]:
    """Apply the activation of this name; 16-bit dtypes compute it in float32, as in torch."""
    wide = x.dtype if x.dtype == jnp.float64 else jnp.float32
    return ACTIVATIONS[name](x.astype(wide)).astype(x.dtype)


def gated(
    gate: Float[Array, "*rows F"], up: Float[Array, "*rows F"], traits: MLPTraits
) -> Float[Array, "*rows F"]:
    """Return activation(gate) · up, or the traits' own product, in the arguments' dtype."""
    if traits.swiglu is None:
        return activated(gate, traits.activation) * up
    wide = gate.dtype if gate.dtype == jnp.float64 else jnp.float32
    return clamped_swiglu(gate.astype(wide), up.astype(wide), traits.swiglu).astype(gate.dtype)


def clamped_swiglu(
    gate: Float[Array, "*rows F"], up: Float[Array, "*rows F"], traits: SwigluTraits
) -> Float[Array, "*rows F"]:
    """Return (up + 1) · gate · sigmoid(alpha · gate), after clamping both."""
    limit = traits.limit
    # Not jnp.clip: at the limit, which 16-bit values meet, it halves the gradient that torch keeps.
    gate = jnp.where(gate > limit, limit, gate)
    up = jnp.where(up > limit, limit, jnp.where(up < -limit, -limit, up))
    return (up + 1) * gate * jax.nn.sigmoid(traits.alpha * gate)


def dense(
    fan_in: int,
    fan_out: int,
    *,
    use_bias: bool,
    dtype: DTypeLike | None = None,
    param_dtype: DTypeLike = jnp.float32,
    rngs: nnx.Rngs,
) -> Projection:
    """Return a linear layer: kernel (fan_in, fan_out), and bias (fan_out,) if use_bias."""
    return Projection(
        (fan_in,),
        (fan_out,),
        use_bias=use_bias,
        dtype=None if dtype is None else jnp.dtype(dtype),
        param_dtype=jnp.dtype(param_dtype),
        precision=None,
        kernel_init=torch_linear_init,
        bias_init=None,
        rngs=rngs,
    )


class MLP(nnx.Module):
    """Feed-forward layers, (…, D) → (…, D): down(activation(up(x))).

    If gated: down(gated(gate(x), up(x))).
    """

    def __init__(
        self,
        embed_dim: int,
        traits: MLPTraits,
        *,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        options: Any = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        make: Any = partial(dense, use_bias=traits.use_bias, **options)
        self.traits = traits
        self.up = make(embed_dim, traits.width)
        self.gate = nnx.data(make(embed_dim, traits.width) if traits.is_gated else None)
        self.down = make(traits.width, embed_dim)

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        if self.gate is None:
            return self.down(activated(self.up(x), self.traits.activation))
        return self.down(gated(self.gate(x), self.up(x), self.traits))
