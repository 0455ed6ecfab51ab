"""A sentence's attention: a toy tokenizer, an embedding and multi-head attention.

The torch side has the same names in ``torch_ref.plain_mha``.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jax_attn.attention import checks
from jax_attn.attention.annotations import AnyArray
from jax_attn.attention.mask import MaskLike
from jax_attn.nn.embedding import rows_of
from jax_attn.nn.multi_head import MultiHeadAttention

WORD_TO_INDEX = {"this": 1, "is": 2, "an": 3, "example": 4, "sentence": 5}


def simple_tokenizer(sentence: str) -> list[int]:
    """Return each word's index, split at white space, ignoring case; 0 for an unknown word."""
    return [WORD_TO_INDEX.get(word, 0) for word in sentence.lower().split()]


def encode_sentence(
    sentence: str, tokenizer: Callable[[str], list[int]] = simple_tokenizer, max_len: int = 10
) -> Int[Array, " max_len"]:
    """Return the sentence's tokens, truncated or padded with 0 to max_len; (max_len,) int32."""
    checks.raise_all("encode_sentence", checks.count_problems(max_len=max_len))
    tokens = tokenizer(sentence)[:max_len]
    return jnp.asarray(np.array(tokens + [0] * (max_len - len(tokens)), np.int32))


class SentenceAttention(nnx.Module):
    """Self-attention over embedded tokens: attention(embedding(tokens)).

    ``embedding`` is an nnx.Embed (vocab_size, embed_dim), drawn from N(0, 1) as torch's;
    ``attention`` a MultiHeadAttention(embed_dim, num_heads, …), which takes the options.
    """

    def __init__(
        self,
        vocab_size: int,
        embed_dim: int,
        num_heads: int,
        *,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        problems = checks.count_problems(vocab_size=vocab_size)
        checks.raise_all(type(self).__name__, problems)
        self.attention = MultiHeadAttention(
            embed_dim, num_heads, dtype=dtype, param_dtype=param_dtype, rngs=rngs, **options
        )
        self.embedding = nnx.Embed(
            vocab_size,
            embed_dim,
            dtype=dtype,
            param_dtype=param_dtype,
            embedding_init=jax.nn.initializers.normal(1.0),
            rngs=rngs,
        )

    def __call__(
        self, tokens: Int[AnyArray, "B T"], mask: MaskLike | None = None, **options: Any
    ) -> Float[Array, "B T D"]:
        """Map (B, T) integer tokens to (B, T, D); mask and options as for MultiHeadAttention.

        Raises ArgumentError if tokens are not (B, T) integers. A token outside the embedding gives
        NaN, because values are unknown under jit.
        """
        are_integers = checks.is_integer_array(tokens)
        if not are_integers or len(tokens.shape) != 2:
            wanted = "rank 2 (B, T)" if are_integers else "integers (B, T)"
            problem = f"tokens: expected {wanted}, got {checks.summary(tokens)}"
            checks.raise_all(type(self).__name__, [problem])
        table = self.embedding.embedding[...]
        embedded = rows_of(table.astype(self.embedding.dtype or table.dtype), jnp.asarray(tokens))
        return self.attention(embedded, mask=mask, **options)
