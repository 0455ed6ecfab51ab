"""Splash attention, Pallas's block-sparse kernel for TPUs: the calls that it can serve.

It takes K and V as they are, for any number of query heads to each, and skips the blocks that a
band hides; segments and lengths are masked within blocks. The query is scaled beforehand, in its
dtype. On the matrix unit all its products are single bfloat16 passes summed in float32: for
bfloat16 that rounds the weights, for float32 all four operands, as XLA does on a TPU at the default
precision. It has no jvp, and its gradients no derivative.
"""

import jax
import jax.numpy as jnp

from jax_attn.attention import checks, meshes
from jax_attn.attention.call import Call
from jax_attn.attention.kernels import vendors

# The longest head whose blocks the compilers for v5e, v6e and tpu7x accepted in tests.
LONGEST_HEAD = 256
# The kernel's smallest block; dense serves calls as well that leave most of a block empty.
BLOCK = 128


def attention(call: Call, interpret: bool = False) -> jax.Array:
    """Compute softmax(scale·QKᵀ)·V for a call that is not refused; (B, T, N, Hv).

    interpret: run in Pallas's interpreter, on any platform, slowly; its products are not rounded.
    """
    from jax_attn.attention.kernels import splash_kernel

    return splash_kernel.attention(call, interpret)


def refusals(call: Call) -> list[str]:
    """List every reason why splash cannot serve the call."""
    if unknown := vendors.unknown_sizes(call):
        return unknown
    mask, heads = call.mask, (call.H, call.Hv)
    longest = f"H and Hv may be {LONGEST_HEAD} at most, here {heads[0]} and {heads[1]}"
    ids = None if mask.q_segments is None else mask.q_segments.dtype
    refusals = vendors.refusals(call, ("bfloat16", "float32"), "in single bfloat16 passes")
    refusals += mask.unread("lo", "hi", "kv_lengths", "q_segments", "kv_segments")
    return refusals + checks.holding(
        {
            longest: max(heads) > LONGEST_HEAD,
            "it adds no bias": call.bias is not None,
            "it supports no bias_k, and returns no differentiable log-sum-exp with which to merge "
            "it": call.bias_k is not None,
            f"it compares segments in int32, not in {ids}": ids not in (None, jnp.int32),
            "it takes no band that differs by row or is traced": not mask.band_is_static,
            "within a shard_map with check_vma=True it does not declare along which axes its "
            "results vary": meshes.checks_vma(),
            "XLA cannot shard it in a mesh of Auto axes": meshes.in_auto_mesh(call),
        }
    )


def drawbacks(call: Call, platform: str) -> list[str]:
    """Say why another kernel is preferable for the call."""
    if call.T < BLOCK or call.S < BLOCK:
        return [f"it works on {BLOCK} queries and keys at least, here {call.T} and {call.S}"]
    return []
