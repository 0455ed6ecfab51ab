"""Steps from products of queries and keys to scores, in the one order that every kernel follows."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_attn.attention.call import Call
from jax_attn.attention.meshes import in_auto_mesh


def rows(call: Call) -> tuple[str, tuple[int, ...]]:
    """Return the axes of a group's queries, in letters and sizes: R = G·T, or else G and T.

    With R, products are batches of matrices: XLA would copy operands of more axes for each product
    of the gradient. In a mesh of Auto axes it would gather a T that is sharded, as a part of R.
    """
    if call.G > 1 and in_auto_mesh(call.query):
        return "GT", (call.G, call.T)
    return "R", (call.G * call.T,)


def products(call: Call, letters: str, key: jax.Array) -> jax.Array:
    """Return scale·QKᵀ in the softmax's dtype; `letters` has queries (B, K, R, H), R = G·T."""
    R, sizes = rows(call)
    q_BKRH = call.query.swapaxes(1, 2).reshape(call.B, call.K, *sizes, call.H)
    products = call.scale * jnp.einsum(
        letters.replace("R", R),
        q_BKRH,
        key,
        precision=call.precision,
        preferred_element_type=call.softmax_dtype,
    )
    return products.reshape(call.B, call.K, call.G * call.T, *products.shape[2 + len(sizes) :])


def scores(call: Call, products: jax.Array, bias: jax.Array | None) -> jax.Array:
    """Apply softcap and bias, in the products' dtype.

    products: all of scale·QKᵀ or a tile. bias: broadcasts to products; may be None.
    """
    if call.softcap is not None:
        products = call.softcap * jnp.tanh(products / call.softcap)
    return products if bias is None else products + bias.astype(products.dtype)


def masked(scores: jax.Array, allowed: jax.Array | None, hidden: float = -jnp.inf) -> jax.Array:
    """Return the scores, `hidden` where a pair may not attend. allowed: None if all pairs may."""
    return scores if allowed is None else jnp.where(allowed, scores, hidden)


def no_maximum(dtype: DTypeLike) -> float:
    """Return what stands for the largest score of a query that sees no key.

    It is so large that exp(score − it) is 0, and not ∞, which jax_debug_infs takes for an error.
    A bias may be as large: such a query is recognized by its sum of weights, which is 0.
    """
    return float(jnp.finfo(dtype).max)


def or_one(total: jax.Array) -> jax.Array:
    """Return sums of weights as divisors: 1 for a query that sees no key."""
    return jnp.where(total == 0, 1, total)


def extra_scores(call: Call) -> jax.Array:
    """Return scores of bias_k, the zero key (0) and the sinks, if present; (B, N, T, 0 to 3)."""
    dtype, shape = call.softmax_dtype, (call.B, call.N, call.T)
    columns = []
    if call.bias_k is not None:
        products_BKR = products(call, "BKRH,KH->BKR", call.bias_k)
        columns.append(scores(call, products_BKR.reshape(shape), None))
    if call.add_zero_attn:
        columns.append(jnp.zeros(shape, dtype))
    if call.sinks is not None:
        columns.append(jnp.broadcast_to(call.sinks.astype(dtype)[:, None], shape))
    return jnp.stack(columns, axis=-1) if columns else jnp.zeros((*shape, 0), dtype)
