"""Attention over keys that lie in several arrays: each part by itself, then merged.

A part is what attention to some of the keys comes to before the division; two parts make one
as two blocks of keys do in the online softmax (Milakov & Gimelshein, 2018).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_attn.attention.call import Call
from jax_attn.attention.kernels import blocked


class Part(NamedTuple):
    """What the exponentials of the scores, and the values weighted by them, add up to.

    total (B, K, G, T) and out (B, K, G, T, Hv): the two sums, in the softmax's dtype, each over
    exp(base). base (B, K, G, T): a largest score, −∞ where a query sees no key; it is
    arbitrary, so no gradient goes through it.
    """

    base: jax.Array
    total: jax.Array
    out: jax.Array


def merged(a: Part, b: Part) -> Part:
    """Attention to the keys of both."""
    base = jnp.maximum(a.base, b.base)
    a_share, b_share = jnp.exp(a.base - _finite(base)), jnp.exp(b.base - _finite(base))
    total = a.total * a_share + b.total * b_share
    return Part(base, total, a.out * a_share[..., None] + b.out * b_share[..., None])


def divided(part: Part) -> jax.Array:
    """The attention (B, T, N, Hv); 0 where a query sees no key."""
    mean_BKGTH = part.out / jnp.where(part.total == 0, 1, part.total)[..., None]
    B, K, G, T, Hv = mean_BKGTH.shape
    return mean_BKGTH.transpose(0, 3, 1, 2, 4).reshape(B, T, K * G, Hv)


def over(call: Call, k_BKHS: jax.Array, v_BKSH: jax.Array, allowed_BTS: jax.Array) -> Part:
    """All of the call's queries to these keys and values, every score written out.

    The keys lie with their features before their places: a query row times such a matrix is the
    one product by a cached key that XLA:CPU does at the speed of memory.
    """
    dtype = call.softmax_dtype
    q_BKGTH = call.query.reshape(call.B, call.T, call.K, call.G, call.H).transpose(0, 2, 3, 1, 4)
    scores = call.scale * jnp.einsum(
        "BKGTH,BKHS->BKGTS",
        q_BKGTH,
        k_BKHS,
        precision=call.precision,
        preferred_element_type=dtype,
    )
    if call.softcap is not None:
        scores = call.softcap * jnp.tanh(scores / call.softcap)
    scores = jnp.where(allowed_BTS[:, None, None], scores, -jnp.inf)
    base = jax.lax.stop_gradient(scores.max(axis=-1))
    p_BKGTS = jnp.exp(scores - _finite(base)[..., None])
    out = jnp.einsum("BKGTS,BKSH->BKGTH", p_BKGTS, v_BKSH.astype(dtype), precision=call.precision)
    return Part(base, p_BKGTS.sum(axis=-1), out)


def whole(call: Call) -> Part:
    """All that the call asks for, tile by tile; it has no bias and no dropout."""
    out_BTNH, lse_BNT = blocked.with_lse(call)
    lse_BKGT = lse_BNT.reshape(call.B, call.K, call.G, call.T)
    out_BKGTH = out_BTNH.reshape(call.B, call.T, call.K, call.G, -1).transpose(0, 2, 3, 1, 4)
    seen = lse_BKGT != jnp.inf
    base = jax.lax.stop_gradient(jnp.where(seen, lse_BKGT, -jnp.inf))
    # 1, with the gradient of what it stands for.
    total = jnp.where(seen, jnp.exp(jnp.where(seen, lse_BKGT, 0) - _finite(base)), 0)
    return Part(base, total, out_BKGTH * total[..., None])


def _finite(base: jax.Array) -> jax.Array:
    return jnp.where(base == -jnp.inf, 0, base)
