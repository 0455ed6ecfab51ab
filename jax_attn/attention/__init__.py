"""Attention on arrays: pure functions, and what says who may attend to whom."""

from jax_attn.attention.api import attention_weights, dot_product_attention, explain
from jax_attn.attention.checks import ArgumentError
from jax_attn.attention.dispatch import Explanation
from jax_attn.attention.dropout import Dropout
from jax_attn.attention.mask import Mask
from jax_attn.attention.position_bias import Alibi, alibi
from jax_attn.attention.rotary import Rotary, rotate

__all__ = [
    "Alibi",
    "ArgumentError",
    "Dropout",
    "Explanation",
    "Mask",
    "Rotary",
    "alibi",
    "attention_weights",
    "dot_product_attention",
    "explain",
    "rotate",
]
