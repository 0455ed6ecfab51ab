"""Ports of the designs: attention with zeros for parameters, and attention over embedded tokens."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jax_attn import nn as ported
from jax_attn.attention.annotations import AnyArray
from jax_attn.nn.embedding import rows_of
from jax_attn.selfcheck.matrix.cases import Size


def _zeros(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    return np.zeros(shape, dtype)  # NumPy's, so that no program is compiled


def _all_heads(size: Size) -> int:
    return size.N


class PortBuilder:
    """Builds the module with the given number of key/value heads: (size, dtype, rngs) -> module.

    The call takes further options of the module by keyword.
    """

    def __init__(self, kv_heads: Callable[[Size], int] = _all_heads, **options: Any):
        self.kv_heads, self.options = kv_heads, options

    def __call__(self, size: Size, dtype: str, rngs: nnx.Rngs, **more: Any) -> nnx.Module:
        options = {k: v(size) if callable(v) else v for k, v in self.options.items()} | more
        options |= {"dtype": dtype, "param_dtype": dtype, "rngs": rngs}
        # Every parameter is overwritten with the reference's; random values would be wasted.
        options |= {"kernel_init": _zeros, "bias_init": _zeros}
        K = self.kv_heads(size)
        if K == size.N:
            return ported.MultiHeadAttention(size.D, size.N, **options)
        if K == 1:
            return ported.MultiQueryAttention(size.D, size.N, **options)
        return ported.GroupedQueryAttention(size.D, size.N, K, **options)


class EmbeddedAttention(nnx.Module):
    """Self-attention over embedded tokens, attention(embedding(tokens)): (B, T) -> (B, T, D).

    It mirrors ``torch_ref.plain_mha.SentenceAttention``; ``attention`` takes the options.
    """

    def __init__(
        self,
        vocab_size: int,
        embed_dim: int,
        num_heads: int,
        *,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        options |= {"param_dtype": param_dtype, "rngs": rngs}
        self.attention = ported.MultiHeadAttention(embed_dim, num_heads, **options)
        self.embedding = nnx.Embed(vocab_size, embed_dim, param_dtype=param_dtype, rngs=rngs)

    def __call__(self, tokens: Int[AnyArray, "B T"]) -> Float[Array, "B T D"]:
        table = self.embedding.embedding[...]
        return self.attention(rows_of(table, jnp.asarray(tokens)))
