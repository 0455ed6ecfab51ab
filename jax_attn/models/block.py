"""A block of a transformer, and a stack of blocks."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jax_attn.attention import Alibi, KVCache, Mask
from jax_attn.families.traits import BlockTraits
from jax_attn.models.attention import attention
from jax_attn.models.experts import Experts
from jax_attn.models.mlp import MLP
from jax_attn.models.norm import Norm
from jax_attn.nn.arguments import Positions


class Block(nnx.Module):
    """Attention and an MLP, each with a residual and its norms: (B, T, D) → (B, T, D).

    `jax_attn.families.traits.NormPlacement` says where the norms are.
    """

    def __init__(
        self,
        traits: BlockTraits,
        *,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        options: Any = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        D, is_sandwich = traits.attention.embed_dim, traits.placement == "sandwich"
        norm: Any = partial(Norm, D, traits=traits.norm, **options)
        self.placement = traits.placement
        self.is_causal, self.window = traits.attention.is_causal, traits.attention.window
        # ALiBi is the same in every block: the model computes it once for all of them.
        self.attention = attention(replace(traits.attention, bias=None), **options)
        self.mlp = (MLP if traits.mlp.experts is None else Experts)(D, traits.mlp, **options)
        self.attention_norm = norm()
        self.mlp_norm: Any = nnx.data(None if traits.shares_norm else norm())
        self.attention_out_norm: Any = nnx.data(norm() if is_sandwich else None)
        self.mlp_out_norm: Any = nnx.data(norm() if is_sandwich else None)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        mask: Mask,
        positions: Positions | None = None,
        cache: KVCache | None = None,
        bias: Float[Array, "#B #N #T T"] | Alibi | None = None,
    ) -> tuple[Float[Array, "B T D"], KVCache | None]:
        """Return the block's output and, if a cache is given, the cache extended by these tokens.

        mask: the same for every layer. positions: for rotary, 0 … T−1 unless given. bias:
        added to the scores; with a cache, an Alibi.
        """
        if self.placement == "post":
            attended, cache = self._attended(x, mask, positions, cache, bias)
            x = self.attention_norm(x + attended)
            return self.mlp_norm(x + self.mlp(x)), cache
        read = self.attention_norm(x)
        attended, cache = self._attended(read, mask, positions, cache, bias)
        if self.placement == "parallel":
            read = read if self.mlp_norm is None else self.mlp_norm(x)
            return x + (attended + self.mlp(read)), cache
        if self.placement == "sandwich":
            x = x + self.attention_out_norm(attended)
            return x + self.mlp_out_norm(self.mlp(self.mlp_norm(x))), cache
        x = x + attended
        return x + self.mlp(self.mlp_norm(x)), cache

    def empty_cache(self, batch: int, length: int) -> KVCache:
        """Return a cache of `length` tokens a row, or a ring of this block's window if shorter."""
        if self.window is not None and self.window < length:
            return self.attention.empty_cache(batch, window=self.window)
        return self.attention.empty_cache(batch, length)

    def _attended(
        self,
        x: jax.Array,
        mask: Mask,
        positions: Positions | None,
        cache: KVCache | None,
        bias: Any,
    ) -> tuple[jax.Array, KVCache | None]:
        if self.window is not None:
            mask &= Mask.window(self.window - 1, None)
        if cache is not None:
            return self.attention(x, mask=mask, bias=bias, cache=cache)
        if self.attention.rotary is None:
            positions = None
        attended = self.attention(
            x, mask=mask, is_causal=self.is_causal, positions=positions, bias=bias
        )
        return attended, None


class Stack(nnx.List):
    """A sequence of blocks, each applied to the output of the one before."""

    def __call__(
        self,
        x: Float[Array, "B T D"],
        mask: Mask,
        positions: Positions | None = None,
        caches: Sequence[KVCache] | None = None,
        bias: Float[Array, "#B #N #T T"] | Alibi | None = None,
    ) -> tuple[Float[Array, "B T D"], tuple[KVCache, ...] | None]:
        """Return the last block's output, and the caches extended by these tokens."""
        if caches is None:
            for layer in self:
                x, _ = layer(x, mask, positions, bias=bias)
            return x, None
        grown = []
        for layer, cache in zip(self, caches, strict=True):
            x, cache = layer(x, mask, cache=cache, bias=bias)
            grown.append(cache)
        return x, tuple(grown)
