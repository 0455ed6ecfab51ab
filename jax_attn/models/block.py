"""A block of a transformer, and a stack of blocks."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jax_attn.attention import KVCache, Mask
from jax_attn.families.traits import BlockTraits, MLPTraits
from jax_attn.models.attention import attention
from jax_attn.models.norm import Norm
from jax_attn.nn.arguments import Positions
from jax_attn.nn.projection import Projection, torch_linear_init

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "tanh": jnp.tanh,
}
"""Activation functions, by their names in traits."""


def activated(x: Float[Array, "*rows F"], name: str) -> Float[Array, "*rows F"]:
    """Apply the activation of this name; 16-bit dtypes compute it in float32, as in torch."""
    wide = x.dtype if x.dtype == jnp.float64 else jnp.float32
    return ACTIVATIONS[name](x.astype(wide)).astype(x.dtype)


def dense(
    fan_in: int,
    fan_out: int,
    *,
    use_bias: bool,
    dtype: DTypeLike | None = None,
    param_dtype: DTypeLike = jnp.float32,
    rngs: nnx.Rngs,
) -> Projection:
    """Return a linear layer: kernel (fan_in, fan_out), and bias (fan_out,) if use_bias."""
    return Projection(
        (fan_in,),
        (fan_out,),
        use_bias=use_bias,
        dtype=None if dtype is None else jnp.dtype(dtype),
        param_dtype=jnp.dtype(param_dtype),
        precision=None,
        kernel_init=torch_linear_init,
        bias_init=None,
        rngs=rngs,
    )


class MLP(nnx.Module):
    """Feed-forward layers, (…, D) → (…, D): down(activation(up(x))).

    If gated: down(activation(gate(x)) · up(x)).
    """

    def __init__(
        self,
        embed_dim: int,
        traits: MLPTraits,
        *,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        options: Any = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        make: Any = partial(dense, use_bias=traits.use_bias, **options)
        self.activation = traits.activation
        self.up = make(embed_dim, traits.width)
        self.gate = nnx.data(make(embed_dim, traits.width) if traits.is_gated else None)
        self.down = make(traits.width, embed_dim)

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        if self.gate is None:
            return self.down(activated(self.up(x), self.activation))
        return self.down(activated(self.gate(x), self.activation) * self.up(x))


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
        self.mlp = MLP(D, traits.mlp, **options)
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
        bias: Float[Array, "#B #N #T T"] | None = None,
    ) -> tuple[Float[Array, "B T D"], KVCache | None]:
        """Return the block's output and, if a cache is given, the cache extended by these tokens.

        mask: the same for every layer. positions: for rotary, 0 … T−1 unless given. bias:
        added to the scores.
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
        bias: jax.Array | None,
    ) -> tuple[jax.Array, KVCache | None]:
        if self.window is not None:
            mask &= Mask.window(self.window - 1, None)
        if cache is not None:
            return self.attention(x, mask=mask, cache=cache)
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
        bias: Float[Array, "#B #N #T T"] | None = None,
    ) -> tuple[Float[Array, "B T D"], tuple[KVCache, ...] | None]:
        """Return the last block's output, and the caches extended by these tokens."""
        if caches is None:
            for layer in self:
                x, _ = layer(x, mask, positions, bias=bias)
            return x, None
        grown = []
        for layer, cache in zip(self, caches, strict=True):
            x, cache = layer(x, mask, cache=cache)
            grown.append(cache)
        return x, tuple(grown)
