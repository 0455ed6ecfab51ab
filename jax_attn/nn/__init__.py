"""Attention as Flax NNX modules: thin layers around ``jax_attn.attention``."""

from jax_attn.attention import KVCache
from jax_attn.nn.attention import GroupedQueryAttention
from jax_attn.nn.multi_head import MultiHeadAttention, MultiQueryAttention
from jax_attn.nn.projection import torch_bias_init, torch_linear_init
from jax_attn.nn.relative_bias import RelativeBias

__all__ = [
    "GroupedQueryAttention",
    "KVCache",
    "MultiHeadAttention",
    "MultiQueryAttention",
    "RelativeBias",
    "torch_bias_init",
    "torch_linear_init",
]
