"""Attention over keys that lie in several arrays: over each by itself, then merged.

Two partial softmaxes make one as two blocks of keys do in the online softmax (Milakov &
Gimelshein, 2018).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_attn.attention.call import Call
from jax_attn.attention.kernels import blocked
from jax_attn.attention.kernels.dense import scores


class PartialSoftmax(NamedTuple):
    """Attention to some of the keys, before the division, in the softmax's dtype.

    maximum (B, K, G, T): a largest score, −∞ where a query sees no key. It is arbitrary, so no
    gradient goes through it. total (B, K, G, T): the sum of exp(score − maximum). weighted
    (B, K, G, T, Hv): the sum of the values, each times its exp(score − maximum).
    """

    maximum: jax.Array
    total: jax.Array
    weighted: jax.Array

    def merged(self, other: "PartialSoftmax") -> "PartialSoftmax":
        """Attention to the keys of both."""
        maximum = jnp.maximum(self.maximum, other.maximum)
        share = jnp.exp(self.maximum - _finite(maximum))
        other_share = jnp.exp(other.maximum - _finite(maximum))
        return PartialSoftmax(
            maximum,
            self.total * share + other.total * other_share,
            self.weighted * share[..., None] + other.weighted * other_share[..., None],
        )

    def mean(self) -> jax.Array:
        """The attention (B, T, N, Hv); 0 where a query sees no key."""
        mean_BKGTH = self.weighted / jnp.where(self.total == 0, 1, self.total)[..., None]
        B, K, G, T, Hv = mean_BKGTH.shape
        return mean_BKGTH.transpose(0, 3, 1, 2, 4).reshape(B, T, K * G, Hv)


def over_page(
    call: Call, k_BKHS: jax.Array, v_BKSH: jax.Array, allowed_BTS: jax.Array
) -> PartialSoftmax:
    """Attention of all the call's queries to these keys and values, every score written out.

    The keys lie with their features before their places: a query row times such a matrix is the
    one product by a cached key that XLA:CPU does at the speed of memory.
    """
    dtype = call.softmax_dtype
    q_BKGTH = call.query.reshape(call.B, call.T, call.K, call.G, call.H).transpose(0, 2, 3, 1, 4)
    products_BKGTS = jnp.einsum(
        "BKGTH,BKHS->BKGTS", q_BKGTH, k_BKHS, precision=call.precision, preferred_element_type=dtype
    )
    scores_BKGTS = scores(call, products_BKGTS, None, allowed_BTS[:, None, None])
    maximum = jax.lax.stop_gradient(scores_BKGTS.max(axis=-1))
    p_BKGTS = jnp.exp(scores_BKGTS - _finite(maximum)[..., None])
    weighted = jnp.einsum(
        "BKGTS,BKSH->BKGTH", p_BKGTS, v_BKSH.astype(dtype), precision=call.precision
    )
    return PartialSoftmax(maximum, p_BKGTS.sum(axis=-1), weighted)


def by_tiles(call: Call) -> PartialSoftmax:
    """Attention to the call's own keys by the blocked kernel; the call has no dropout."""
    out_BTNH, lse_BNT = blocked.with_lse(call)
    lse_BKGT = lse_BNT.reshape(call.B, call.K, call.G, call.T)
    out_BKGTH = out_BTNH.reshape(call.B, call.T, call.K, call.G, -1).transpose(0, 2, 3, 1, 4)
    seen = lse_BKGT != jnp.inf
    maximum = jax.lax.stop_gradient(jnp.where(seen, lse_BKGT, -jnp.inf))
    # 1, with the gradient of what it stands for.
    total = jnp.where(seen, jnp.exp(jnp.where(seen, lse_BKGT, 0) - _finite(maximum)), 0)
    return PartialSoftmax(maximum, total, out_BKGTH * total[..., None])


def _finite(maximum: jax.Array) -> jax.Array:
    return jnp.where(maximum == -jnp.inf, 0, maximum)
