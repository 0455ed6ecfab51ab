"""Attention with as many key/value heads as query heads, and with one for all of them."""

from typing import Any

from flax import nnx

from jax_attn.nn.attention import GroupedQueryAttention


class MultiHeadAttention(GroupedQueryAttention):
    """Attention in which each query head has its own key/value head: K = N.

    Arguments as GroupedQueryAttention, without num_kv_heads. Vaswani et al., 2017.
    """

    def __init__(self, embed_dim: int, num_heads: int, *, rngs: nnx.Rngs, **options: Any):
        super().__init__(embed_dim, num_heads, num_heads, rngs=rngs, **options)


class MultiQueryAttention(GroupedQueryAttention):
    """Attention in which all query heads share one key/value head: K = 1.

    Arguments as GroupedQueryAttention, without num_kv_heads. Shazeer, 2019.
    """

    def __init__(self, embed_dim: int, num_heads: int, *, rngs: nnx.Rngs, **options: Any):
        super().__init__(embed_dim, num_heads, 1, rngs=rngs, **options)
