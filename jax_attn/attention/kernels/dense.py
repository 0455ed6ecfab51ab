"""Attention by its definition: every score, a softmax, a weighted mean."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jax_attn.attention.call import Call
from jax_attn.attention.kernels.scores import (
    extra_scores,
    masked,
    no_maximum,
    products,
    rows,
    scores,
)


def _with_hidden_pairs(fn: Callable[[Call], jax.Array]) -> Callable[[Call], jax.Array]:
    """Compile the function under jax_debug_infs, which takes the −∞ of hidden pairs for an error.

    Only there: a compiled function that is inlined loses its lines of source.
    """
    compiled = jax.jit(fn, inline=True)

    @functools.wraps(fn)
    def run(call: Call) -> jax.Array:
        return (compiled if jax.config.jax_debug_infs else fn)(call)  # type: ignore[attr-defined]

    return run


@_with_hidden_pairs
def attention(call: Call) -> jax.Array:
    """Compute softmax(scale·QKᵀ)·V with all options of the call; (B, T, N, Hv)."""
    return _mean(call).astype(call.query.dtype)


def with_sums(call: Call) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the output, the largest score of each query and the sum of exp(score − maximum).

    Shapes: (B, T, N, Hv), (B, N, T), (B, N, T). All are in the softmax's dtype; the call has no
    extra keys. For a query that sees no key the maximum is `no_maximum` and the sum 0. The
    maximum is arbitrary, so no gradient goes through it.
    """
    scores_BNTS = _scores(call)
    maximum_BNT = jax.lax.stop_gradient(scores_BNTS.max(axis=-1))
    empty_BNT = maximum_BNT == -jnp.inf
    maximum_BNT = jnp.where(empty_BNT, no_maximum(call.softmax_dtype), maximum_BNT)
    total_BNT = jnp.exp(scores_BNTS - maximum_BNT[..., None]).sum(axis=-1)
    return _mean(call), maximum_BNT, jnp.where(empty_BNT, 0, total_BNT)


@_with_hidden_pairs
def weights(call: Call) -> jax.Array:
    """Return the softmax before dropout; (B, N, T, S), with more columns for extra keys."""
    return _probabilities(call).astype(call.query.dtype)


def _mean(call: Call) -> jax.Array:
    P_BNTS = _probabilities(call)
    if call.dropout is not None:
        P_BNTS = call.dropout.apply(P_BNTS)
    if call.extra_columns:
        P_BNTS, P_BNTE = P_BNTS[..., : call.S], P_BNTS[..., call.S :]
    R, sizes = rows(call)
    P_BKRS = P_BNTS.reshape(call.B, call.K, *sizes, call.S)
    # The weights stay unrounded: casting them to bfloat16 or float16 before this product would lose
    # short rows a quarter of the accuracy of torch's kernel, which divides last.
    v_BKSH = call.value.astype(call.softmax_dtype).swapaxes(1, 2)
    letters = "BKRS,BKSH->BKRH".replace("R", R)
    out_BKRH = jnp.einsum(letters, P_BKRS, v_BKSH, precision=call.precision)
    if call.bias_v is not None:  # all other extra keys have the value 0
        P_BKR1 = P_BNTE[..., :1].reshape(call.B, call.K, *sizes, 1)
        bias_v = call.bias_v.astype(call.softmax_dtype)
        out_BKRH += P_BKR1 * bias_v.reshape(call.K, *[1] * len(sizes), call.Hv)
    return out_BKRH.reshape(call.B, call.N, call.T, call.Hv).swapaxes(1, 2)


def _probabilities(call: Call) -> jax.Array:
    """Return the softmax in its own dtype; a row with nothing to attend to is 0.

    After the S columns come those of the extra keys that have one.
    """
    scores_BNTS = _scores(call)
    if call.has_extra_keys:
        scores_BNTS = jnp.concatenate([scores_BNTS, extra_scores(call)], axis=-1)
    if call.mask.is_open and call.bias is None:  # nothing hides a key: no row is empty
        return _without_sinks(call, jax.nn.softmax(scores_BNTS, axis=-1))
    empty_BNT1 = scores_BNTS.max(axis=-1, keepdims=True) == -jnp.inf
    # The softmax of a row of -inf is NaN, which would reach the gradient through any later `where`:
    # such a row is replaced both before and after the softmax.
    P_BNTS = jax.nn.softmax(jnp.where(empty_BNT1, 0.0, scores_BNTS), axis=-1)
    return _without_sinks(call, jnp.where(empty_BNT1, 0.0, P_BNTS))


def _without_sinks(call: Call, P_BNTS: jax.Array) -> jax.Array:
    return P_BNTS if call.sinks is None else P_BNTS[..., :-1]


def _scores(call: Call) -> jax.Array:
    products_BKRS = products(call, "BKRH,BKSH->BKRS", call.key.swapaxes(1, 2))
    products_BNTS = products_BKRS.reshape(call.B, call.N, call.T, call.S)
    allowed = None if call.mask.is_open else call.mask.materialize(call.T, call.S)
    return masked(scores(call, products_BNTS, call.bias), allowed)
