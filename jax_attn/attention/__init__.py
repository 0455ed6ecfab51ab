"""Attention on arrays: pure functions, and masks that say which query may attend to which key."""

from jax_attn.attention.api import (
    attend_with_cache,
    attention_weights,
    dot_product_attention,
    explain,
    explain_kernel,
)
from jax_attn.attention.checks import ArgumentError
from jax_attn.attention.dispatch import KernelExplanation
from jax_attn.attention.dropout import Dropout
from jax_attn.attention.kv_cache import KVCache
from jax_attn.attention.mask import Mask
from jax_attn.attention.position_bias import Alibi, DistanceBias, alibi
from jax_attn.attention.rotary import Rotary, rotate

__all__ = [
    "Alibi",
    "ArgumentError",
    "DistanceBias",
    "Dropout",
    "KVCache",
    "KernelExplanation",
    "Mask",
    "Rotary",
    "alibi",
    "attend_with_cache",
    "attention_weights",
    "dot_product_attention",
    "explain",
    "explain_kernel",
    "rotate",
]
