"""BERT's encoder: embeddings, then layers of attention and a perceptron, each behind a norm."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jax_attn.attention import Mask
from jax_attn.attention.annotations import AnyArray
from jax_attn.nn import MultiHeadAttention


class Perceptron(nnx.Module):
    """down(gelu(up(x))): (…, D) → (…, D), `width` features between; the exact gelu."""

    def __init__(self, embed_dim: int, width: int, *, rngs: nnx.Rngs):
        self.up = nnx.Linear(embed_dim, width, rngs=rngs)
        self.down = nnx.Linear(width, embed_dim, rngs=rngs)

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        return self.down(nnx.gelu(self.up(x), approximate=False))


class BertLayer(nnx.Module):
    """Self-attention, then a perceptron: each added to what it read, the sum normed."""

    def __init__(
        self, embed_dim: int, num_heads: int, width: int, *, epsilon: float, rngs: nnx.Rngs
    ):
        self.attention = MultiHeadAttention(embed_dim, num_heads, rngs=rngs)
        self.attention_norm = _norm(embed_dim, epsilon, rngs)
        self.mlp = Perceptron(embed_dim, width, rngs=rngs)
        self.mlp_norm = _norm(embed_dim, epsilon, rngs)

    def __call__(self, x: Float[Array, "B T D"], mask: Mask) -> Float[Array, "B T D"]:
        x = self.attention_norm(x + self.attention(x, mask=mask))
        return self.mlp_norm(x + self.mlp(x))


class BertEncoder(nnx.Module):
    """A BERT encoder: tokens to their hidden states.

    It computes in float32, without dropout, for inference and for training on top of it. The table
    `jax_attn.transfer.families.BERT` carries its weights both ways.

    Args:
      vocab_size: rows of the table of tokens.
      max_length: rows of the table of positions.
      num_types: rows of the table of token types.
      embed_dim: D.
      num_heads: N.
      num_layers: how many layers there are.
      width: the number of features inside an MLP.
      epsilon: the epsilon of the norms.
      has_pooler: whether `pooler`, a linear map that no call reads, is among the parameters.
      rngs: "params" for the parameters.
    """

    def __init__(
        self,
        vocab_size: int,
        max_length: int,
        num_types: int,
        embed_dim: int,
        num_heads: int,
        num_layers: int,
        width: int,
        *,
        epsilon: float = 1e-12,
        has_pooler: bool = True,
        rngs: nnx.Rngs,
    ):
        self.embed_dim, self.max_length = embed_dim, max_length
        self.token_embedding = nnx.Embed(vocab_size, embed_dim, rngs=rngs)
        self.type_embedding = nnx.Embed(num_types, embed_dim, rngs=rngs)
        self.position_embedding = nnx.Embed(max_length, embed_dim, rngs=rngs)
        self.embedding_norm = _norm(embed_dim, epsilon, rngs)
        self.layers = nnx.List(
            BertLayer(embed_dim, num_heads, width, epsilon=epsilon, rngs=rngs)
            for _ in range(num_layers)
        )
        self.pooler = nnx.data(nnx.Linear(embed_dim, embed_dim, rngs=rngs) if has_pooler else None)

    def __call__(
        self,
        tokens: Int[AnyArray, "B T"],
        lengths: Int[AnyArray, " B"],
        types: Int[AnyArray, "B T"] | None = None,
    ) -> Float[Array, "B T D"]:
        """Encode tokens.

        Args:
          tokens: (B, T) integers.
          lengths: (B,) integers: row b has lengths[b] tokens, at least one; the outputs for the
            others have no meaning.
          types: (B, T) token types; all 0 unless given.

        Returns:
          (B, T, D).

        Raises:
          ValueError: T is more than max_length.
        """
        if (T := tokens.shape[1]) > self.max_length:
            most = f"at most max_length = {self.max_length} a row"
            raise ValueError(f"tokens: expected {most}, got {T}")
        types = jnp.zeros_like(tokens) if types is None else types
        x = self.token_embedding(jnp.asarray(tokens)) + self.type_embedding(jnp.asarray(types))
        x = self.embedding_norm(x + self.position_embedding(jnp.arange(T)))
        mask = Mask.lengths(lengths)
        for layer in self.layers:
            x = layer(x, mask)
        return x


def _norm(embed_dim: int, epsilon: float, rngs: nnx.Rngs) -> nnx.LayerNorm:
    return nnx.LayerNorm(embed_dim, epsilon=epsilon, use_fast_variance=False, rngs=rngs)
