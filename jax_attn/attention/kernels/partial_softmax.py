"""Attention to a part of the keys, which can be merged with attention to the others."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_attn.attention.call import Call
from jax_attn.attention.kernels.scores import extra_scores, or_one
from jax_attn.attention.meshes import MeshAxes


class PartialSoftmax(NamedTuple):
    """Attention to a part of the keys, before the division, in the softmax's dtype.

    Two merge like two blocks of keys in the online softmax (Milakov & Gimelshein, 2018).

    maximum (B, K, G, T): a largest score, −∞ if a query sees no key. It is arbitrary, so no
    gradient goes through it. total (B, K, G, T): the sum of exp(score − maximum). weighted
    (B, K, G, T, Hv): the sum of the values, each times its exp(score − maximum).
    """

    maximum: jax.Array
    total: jax.Array
    weighted: jax.Array

    def merged(self, other: "PartialSoftmax") -> "PartialSoftmax":
        """Return attention to the keys of both."""
        maximum = jnp.maximum(self.maximum, other.maximum)
        share = jnp.exp(self.maximum - finite(maximum))
        other_share = jnp.exp(other.maximum - finite(maximum))
        return PartialSoftmax(
            maximum,
            self.total * share + other.total * other_share,
            self.weighted * share[..., None] + other.weighted * other_share[..., None],
        )

    def of_no_keys(self) -> "PartialSoftmax":
        """Return attention by the same queries to no keys."""
        nothing = jax.tree.map(jnp.zeros_like, self)
        return nothing._replace(maximum=jnp.full_like(self.maximum, -jnp.inf))

    def varying(self, axes: MeshAxes) -> "PartialSoftmax":
        """Return the same inside a shard_map, typed as varying along these mesh axes."""
        return jax.tree.map(lambda x: lax.pcast(x, axes, to="varying"), self)

    def summed(self, axes: MeshAxes) -> "PartialSoftmax":
        """Merge attention over all devices along these mesh axes, inside a shard_map."""
        maximum = lax.pmax(self.maximum, axes)
        share = jnp.exp(self.maximum - finite(maximum))
        total, weighted = self.total * share, self.weighted * share[..., None]
        return PartialSoftmax(maximum, *lax.psum((total, weighted), axes))

    def mean(self) -> jax.Array:
        """Return the attention output (B, T, N, Hv); 0 for a query that sees no key."""
        mean_BKGTH = self.weighted / or_one(self.total)[..., None]
        B, K, G, T, Hv = mean_BKGTH.shape
        return mean_BKGTH.transpose(0, 3, 1, 2, 4).reshape(B, T, K * G, Hv)


def of_sums(
    call: Call, out_BTNH: jax.Array, maximum_BNT: jax.Array, total_BNT: jax.Array
) -> PartialSoftmax:
    """Convert the results of `dense.with_sums`."""
    maximum_BNT = jnp.where(total_BNT == 0, -jnp.inf, maximum_BNT)
    maximum, total = (
        x_BNT.reshape(call.B, call.K, call.G, call.T) for x_BNT in (maximum_BNT, total_BNT)
    )
    out_BKGTH = out_BTNH.reshape(call.B, call.T, call.K, call.G, -1).transpose(0, 2, 3, 1, 4)
    return PartialSoftmax(lax.stop_gradient(maximum), total, out_BKGTH * total[..., None])


def of_extra_keys(call: Call) -> PartialSoftmax:
    """Attend only to the extra keys; the call has at least one."""
    scores_BNTE = extra_scores(call)
    maximum_BNT = lax.stop_gradient(scores_BNTE.max(axis=-1))
    p_BNTE = jnp.exp(scores_BNTE - finite(maximum_BNT)[..., None])
    maximum, total = (
        x_BNT.reshape(call.B, call.K, call.G, call.T) for x_BNT in (maximum_BNT, p_BNTE.sum(-1))
    )
    if call.bias_v is None:
        return PartialSoftmax(maximum, total, jnp.zeros((*total.shape, call.Hv), total.dtype))
    # All other extra keys have the value 0, so they need no dropout.
    p_BNT1 = p_BNTE[..., :1]
    if call.dropout is not None:
        p_BNT1 = call.dropout.apply(p_BNT1, first=call.S)
    v_KH = call.bias_v.astype(total.dtype)
    return PartialSoftmax(maximum, total, p_BNT1.reshape(*total.shape, 1) * v_KH[:, None, None])


def finite(maximum: jax.Array) -> jax.Array:
    """Return the maximum, or 0 where it is −∞, so that it can be subtracted from any score."""
    return jnp.where(maximum == -jnp.inf, 0, maximum)
