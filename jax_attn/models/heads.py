"""Heads: logits over the vocabulary for each token, or over classes."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jax_attn.families.traits import ClassifierTraits, VocabularyTraits
from jax_attn.models.mlp import activated, dense
from jax_attn.models.norm import Norm
from jax_attn.nn.projection import project


class VocabularyHead(nnx.Module):
    """Logits (B, T, D) → (B, T, V), by a kernel (D, V), or by the token table (V, D) if tied."""

    def __init__(self, width: int, vocab_size: int, traits: VocabularyTraits, **options: Any):
        self.activation, self.softcap, self.scale = traits.activation, traits.softcap, traits.scale
        self.dense, self.norm = nnx.data(None), nnx.data(None)
        if traits.activation is not None:
            self.dense = dense(width, width, use_bias=True, **options)
        if traits.norm is not None:
            self.norm = Norm(width, traits=traits.norm, **options)
        self.kernel, self.bias = nnx.data(None), nnx.data(None)
        if not traits.is_tied:
            own = dense(width, vocab_size, use_bias=traits.use_bias, **options)
            self.kernel, self.bias = own.kernel, nnx.data(own.bias)
        elif traits.use_bias:
            self.bias = nnx.Param(jnp.zeros(vocab_size, options["param_dtype"]))

    def __call__(
        self, x: Float[Array, "B T D"], table: Float[Array, "V D"]
    ) -> Float[Array, "B T V"]:
        """Return the logits; table: the token embeddings, used if the head is tied to them."""
        if self.dense is not None and self.activation is not None:
            x = activated(self.dense(x), self.activation)
        if self.norm is not None:
            x = self.norm(x)
        if self.scale is not None:  # in float32 as torch does, which rounds no factor to 16 bits
            x = (x.astype(jnp.promote_types(x.dtype, jnp.float32)) * self.scale).astype(x.dtype)
        kernel = table.T if self.kernel is None else self.kernel[...]
        bias = None if self.bias is None else self.bias[...].astype(x.dtype)
        logits = project(x, kernel.astype(x.dtype), bias, 1)
        if self.softcap is None:
            return logits
        return (self.softcap * activated(logits / self.softcap, "tanh")).astype(x.dtype)


class Classifier(nnx.Module):
    """Logits over classes: for each row (B, C), or for each of its tokens (B, T, C)."""

    def __init__(self, embed_dim: int, classes: int, traits: ClassifierTraits, **options: Any):
        self.reads, self.has_dense = traits.reads, traits.has_dense
        last = dense(embed_dim, classes, use_bias=traits.use_bias, **options)
        if traits.has_dense:
            self.dense = dense(embed_dim, embed_dim, use_bias=True, **options)
            self.out = last
        else:
            self.kernel, self.bias = last.kernel, nnx.data(last.bias)

    def __call__(
        self,
        hidden: Float[Array, "B T D"],
        pooled: Float[Array, "B D"] | None,
        last_B: Int[Array, " B"],
    ) -> Float[Array, "B *T C"]:
        """Return the logits; last_B: the index of each row's last token."""
        x: Any = hidden
        if self.reads == "pooled":
            x = pooled
        elif self.reads == "first":
            x = hidden[:, 0]
        elif self.reads == "last":
            x = jax.vmap(lambda row, place: row[place])(hidden, last_B)
        if self.has_dense:
            return self.out(jnp.tanh(self.dense(x)))
        bias = None if self.bias is None else self.bias[...].astype(x.dtype)
        return project(x, self.kernel[...].astype(x.dtype), bias, 1)
