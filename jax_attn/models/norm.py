"""RMS norm and layer norm of language models, computed in float32."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jax_attn.attention.broadcasting import broadcasting
from jax_attn.families.traits import NormTraits


@broadcasting
def normed(
    x: Float[Array, "*rows D"], scale: Float[Array, " D"], bias: Array | None, traits: NormTraits
) -> Float[Array, "*rows D"]:
    """Return x divided by its root mean square; a layer norm subtracts the mean first. x's dtype.

    Every step is in float32, or float64 for float64; the result is rounded once.
    """
    wide = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
    y, scale = x.astype(wide), scale.astype(wide)
    if traits.kind == "layer":
        y = y - y.mean(axis=-1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.square(y).mean(axis=-1, keepdims=True) + traits.epsilon)
    y = y * (1 + scale if traits.adds_one else scale)
    return (y if bias is None else y + bias.astype(wide)).astype(x.dtype)


class Norm(nnx.Module):
    """`normed` with a learned scale (D,) and, for a layer norm, a bias (D,)."""

    def __init__(
        self,
        features: int,
        *,
        traits: NormTraits,
        dtype: np.dtype | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        del rngs  # initialization is not random
        self.traits, self.dtype = traits, dtype
        start = jnp.zeros if traits.adds_one else jnp.ones
        self.scale = nnx.Param(start(features, param_dtype))
        self.bias = nnx.data(None)
        if traits.kind == "layer":
            self.bias = nnx.Param(jnp.zeros(features, param_dtype))

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        bias = None if self.bias is None else self.bias[...]
        x = x if self.dtype is None else x.astype(self.dtype)
        return normed(x, self.scale[...], bias, self.traits)
