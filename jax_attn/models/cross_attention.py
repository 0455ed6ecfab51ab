"""Attention to another sequence, whose keys and values are computed once for all queries."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_attn.attention import Mask, dot_product_attention
from jax_attn.nn import GroupedQueryAttention


class Memory(NamedTuple):
    """Keys and values (B, S, K, H) of the other sequence, for one layer."""

    keys: Float[Array, "B S K H"]
    values: Float[Array, "B S K H"]


class Source(NamedTuple):
    """An encoder's output, as a decoder reads it.

    Attributes:
      hidden: (B, S, D), the encoder's last hidden states.
      memories: keys and values for each layer of the decoder.
      mask: which places are no padding.
    """

    hidden: Float[Array, "B S D"]
    memories: tuple[Memory, ...]
    mask: Mask


def remembered(attention: GroupedQueryAttention, hidden: Float[Array, "B S D"]) -> Memory:
    """Return the keys and values of a sequence."""
    return Memory(attention.k_proj(hidden), attention.v_proj(hidden))


def recalled(
    attention: GroupedQueryAttention, x: Float[Array, "B T D"], memory: Memory, mask: Mask
) -> Float[Array, "B T D"]:
    """Attend from x to the remembered sequence."""
    query = attention.q_proj(x)
    dtype = jnp.result_type(query, *memory)
    query, keys, values = (array.astype(dtype) for array in (query, *memory))
    scale, softcap = attention.scale, attention.softcap
    attended = dot_product_attention(query, keys, values, mask, scale=scale, softcap=softcap)
    return attention.out_proj(attended)
