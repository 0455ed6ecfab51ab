"""A block of a transformer, and a stack of blocks."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jax_attn.attention import Alibi, DistanceBias, KVCache, Mask
from jax_attn.families.traits import BlockTraits
from jax_attn.models.attention import attention
from jax_attn.models.cross_attention import Memory, Source, recalled
from jax_attn.models.experts import Experts
from jax_attn.models.mlp import MLP
from jax_attn.models.norm import Norm
from jax_attn.nn.arguments import Positions


class Block(nnx.Module):
    """Attention and an MLP, each with a residual and its norms: (B, T, D) → (B, T, D).

    A decoder's block may have cross-attention between them.
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
        bias, cross = traits.attention.bias, traits.cross
        # ALiBi is the same in every block: the model computes it once for all of them.
        own = None if bias is not None and bias.kind == "alibi" else bias
        self.attention = attention(replace(traits.attention, bias=own), **options)
        self.cross_attention: Any = nnx.data(None if cross is None else attention(cross, **options))
        self.cross_attention_norm: Any = nnx.data(None if cross is None else norm())
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
        bias: Float[Array, "#B #N #T T"] | Alibi | DistanceBias | None = None,
        memory: Memory | None = None,
        memory_mask: Mask | None = None,
    ) -> tuple[Float[Array, "B T D"], KVCache | None]:
        """Return the block's output and, if a cache is given, the cache extended by these tokens.

        mask: the same for every layer. positions: for rotary, 0 … T−1 unless given. bias: added to
        the scores; with a cache, an Alibi or a DistanceBias. memory, memory_mask: what
        cross-attention reads, and which of it is no padding.
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
        if self.cross_attention is not None:
            assert memory is not None
            assert memory_mask is not None
            read = self.cross_attention_norm(x)
            x = x + recalled(self.cross_attention, read, memory, memory_mask)
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
        source: Source | None = None,
    ) -> tuple[Float[Array, "B T D"], tuple[KVCache, ...] | None]:
        """Return the last block's output, and the caches extended by these tokens.

        source: what cross-attention reads, if the blocks have it.
        """
        grown, biases = [], self._biases(x.shape[1], caches, bias)
        for n, (layer, own) in enumerate(zip(self, biases, strict=True)):
            beside: Any = {"positions": positions} if caches is None else {"cache": caches[n]}
            if source is not None:
                beside |= {"memory": source.memories[n], "memory_mask": source.mask}
            x, cache = layer(x, mask, bias=own, **beside)
            grown.append(cache)
        return x, None if caches is None else tuple(grown)

    def _biases(self, T: int, caches: Sequence[KVCache] | None, bias: Any) -> Iterator[Any]:
        """Yield the bias that each layer is given.

        A layer with a table adds its own. The layers that follow it and have none are lent its
        bias, which is computed once for all of them.
        """
        tables = [layer.attention.position_bias for layer in self]
        for table, following in zip(tables, [*tables[1:], ...], strict=True):
            if table is None:
                yield bias
                continue
            yield None
            if following is None:
                bias = table(T, T) if caches is None else table.by_distance()
