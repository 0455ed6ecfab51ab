"""cuDNN's fused attention, for NVIDIA GPUs, by way of jax.nn: its conditions and the call.

cuDNN does not specify the output of a query that may attend to nothing. So such a query may attend
to something here, and its output is replaced by 0, which has no gradient.
"""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jax_attn.attention import checks
from jax_attn.attention.call import Call
from jax_attn.attention.kernels import vendors

DTYPES = ("float16", "bfloat16")


def attention(call: Call, implementation: Literal["cudnn", "xla"] = "cudnn") -> jax.Array:
    """Compute softmax(scale·QKᵀ)·V for a call that is not refused; (B, T, N, Hv).

    implementation: jax.nn's; "xla" computes the same on any platform.
    """
    mask, bias = call.mask, call.bias
    allowed, empty = mask.allowed, None
    if bias is not None:
        # A score of −∞ hides its key; cuDNN can hide keys only by a mask.
        seen = bias > -jnp.inf
        allowed = seen if allowed is None else allowed & seen
        bias = _over_scores(jnp.where(seen, bias, 0), call)
    lengths = mask.kv_lengths
    if lengths is not None:
        lengths = jnp.broadcast_to(jnp.asarray(lengths), (call.B,))
        empty = (lengths <= 0)[:, None, None, None]
        lengths = jnp.clip(lengths, 1, call.S)
    if allowed is not None:
        allowed = _over_scores(jnp.asarray(allowed), call)
        visible = mask.materialize(call.T, call.S) & allowed
        empty = ~visible.any(axis=3, keepdims=True).swapaxes(1, 2)
    lo, hi = mask.static_band
    out_BTNH = jax.nn.dot_product_attention(
        call.query,
        call.key,
        call.value,
        bias,
        allowed,
        scale=call.scale,
        is_causal=hi is not None,
        key_value_seq_lengths=lengths,
        local_window_size=None if lo is None else (-lo, 0),
        implementation=implementation,
    )
    return _zeroed(out_BTNH, empty)


def refusals(call: Call) -> list[str]:
    """List every reason why cuDNN cannot serve the call."""
    if unknown := vendors.unknown_sizes(call):
        return unknown
    mask, H, Hv = call.mask, call.H, call.Hv
    lo, hi = mask.static_band if mask.band_is_static else (None, None)
    written = call.bias is not None or mask.allowed is not None
    sizes = f"here {call.T} and {call.S}"
    too_long = H > 256 or (H > 128 and _objection(256) is not None)
    absent, bias_dtype = _objection(8), None if call.bias is None else call.bias.dtype
    refusals = vendors.refusals(call, DTYPES, "the weights in the inputs' dtype")
    refusals += mask.unread("lo", "hi", "kv_lengths", "allowed")
    return refusals + checks.holding(
        {
            f"jax does not support it here: {absent}": absent,
            f"H must be a multiple of 8, here {H}": H % 8,
            f"H may be 128 at most, 256 from Hopper on, here {H}": too_long,
            f"Hv must be H, here {Hv} and {H}": Hv != H,
            "under vmap jax's rules for it fail where only some arrays are mapped": is_mapped(call),
            "it has no softcap": call.softcap is not None,
            "it supports no bias_k, zero key or sinks, and returns no differentiable log-sum-exp "
            "with which to merge them": call.has_extra_keys,
            "it takes no band that differs by row or is traced": not mask.band_is_static,
            "a band must end at the query itself": (lo, hi) != (None, None) and hi != 0,
            "a band must hold the query itself": hi == 0 and lo is not None and lo > 0,
            "a window's last queries would see no key": lo is not None and call.S - lo < call.T,
            "a window and lengths together may hide all keys": lo is not None
            and mask.kv_lengths is not None,
            f"with a bias or a mask T and S must be even, {sizes}": written
            and (call.T % 2 or call.S % 2),
            f"it adds a bias in the query's dtype, not in {bias_dtype}": bias_dtype is not None
            and bias_dtype != call.query.dtype,
        }
    )


@functools.cache
def _objection(H: int) -> str | None:
    """Return the error with which jax refuses cuDNN's attention for this head_dim here, or None."""
    x = jax.ShapeDtypeStruct((1, 1, 1, H), jnp.float16)
    try:
        jax.eval_shape(
            functools.partial(jax.nn.dot_product_attention, implementation="cudnn"), x, x, x
        )
    except (RuntimeError, NotImplementedError) as error:
        return str(error).rstrip(".")
    return None


def is_mapped(call: Call) -> bool:
    """Return whether any of the call's arrays is mapped by `jax.vmap`."""

    def mapped(x: Any) -> bool:
        while hasattr(x, "primal"):  # differentiated inside the vmap
            x = x.primal
        return hasattr(x, "batch_dim")

    return any(map(mapped, jax.tree.leaves(call)))


def _zeroed(out_BTNH: jax.Array, empty: jax.Array | None) -> jax.Array:
    return out_BTNH if empty is None else jnp.where(empty, 0, out_BTNH)


def _over_scores(x: jax.Array, call: Call) -> jax.Array:
    """Return x in rank 4 with its last axes broadcast to T and S, as cuDNN requires."""
    x = x.reshape((1,) * (4 - x.ndim) + x.shape)
    return jnp.broadcast_to(x, (*x.shape[:2], call.T, call.S))
