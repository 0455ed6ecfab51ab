"""From products to scores, in the one order that every kernel of this package keeps."""

import jax
import jax.numpy as jnp

from jax_attn.attention.call import Call


def scores(
    call: Call, products: jax.Array, bias: jax.Array | None, allowed: jax.Array | None
) -> jax.Array:
    """Scale, softcap, bias, mask; in the products' dtype, −∞ where a pair may not attend.

    products: QKᵀ, all of it or a tile. bias, allowed: broadcast to it; None for none.
    """
    scores = call.scale * products
    if call.softcap is not None:
        scores = call.softcap * jnp.tanh(scores / call.softcap)
    if bias is not None:
        scores = scores + bias.astype(scores.dtype)
    return scores if allowed is None else jnp.where(allowed, scores, -jnp.inf)
