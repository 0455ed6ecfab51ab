"""Heads: a logit for each token of the vocabulary, or for each class."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jax_attn.models.block import activated, dense
from jax_attn.models.norm import Norm
from jax_attn.nn.projection import project
from jax_attn.transfer.families.traits import ClassifierTraits, NormTraits, VocabularyTraits


class VocabularyHead(nnx.Module):
    """(B, T, D) → (B, T, V), by a kernel (D, V), or by the table of tokens (V, D) where tied.

    norm: of the dense layer that comes first, where there is one.
    """

    def __init__(
        self,
        width: int,
        vocab_size: int,
        traits: VocabularyTraits,
        norm: NormTraits | None,
        **options: Any,
    ):
        has_dense = traits.activation is not None
        self.activation, self.softcap = traits.activation, traits.softcap
        self.dense = nnx.data(dense(width, width, use_bias=True, **options) if has_dense else None)
        self.norm: Any = nnx.data(
            Norm(width, traits=norm, **options) if has_dense and norm else None
        )
        self.kernel, self.bias = nnx.data(None), nnx.data(None)
        own = dense(width, vocab_size, use_bias=traits.use_bias, **options)
        if not traits.is_tied:
            self.kernel = own.kernel
        if traits.use_bias:
            self.bias = own.bias

    def __call__(
        self, x: Float[Array, "B T D"], table: Float[Array, "V D"]
    ) -> Float[Array, "B T V"]:
        """table: the tokens', read where the head is tied to it."""
        if self.dense is not None and self.activation is not None:
            x = self.norm(activated(self.dense(x), self.activation))
        kernel = table.T if self.kernel is None else self.kernel[...]
        bias = None if self.bias is None else self.bias[...].astype(x.dtype)
        logits = project(x, kernel.astype(x.dtype), bias, 1)
        if self.softcap is None:
            return logits
        return (self.softcap * activated(logits / self.softcap, "tanh")).astype(x.dtype)


class Classifier(nnx.Module):
    """A logit for each class: of a row (B, C), or of each of its tokens (B, T, C)."""

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
        """last_B: the place of each row's last token."""
        x = hidden
        if self.reads == "pooled" and pooled is not None:
            x = pooled
        elif self.reads == "first":
            x = hidden[:, 0]
        elif self.reads == "last":
            x = jax.vmap(lambda row, place: row[place])(hidden, last_B)
        if self.has_dense:
            return self.out(jnp.tanh(self.dense(x)))
        bias = None if self.bias is None else self.bias[...].astype(x.dtype)
        return project(x, self.kernel[...].astype(x.dtype), bias, 1)
