"""Traits of an attention block -> the block in either framework, and how each is called."""

from functools import partial
from typing import Any

import jax
import torch
from flax import nnx

import torch_ref
from jax_attn import nn
from jax_attn.attention import Alibi, Mask, rotary
from jax_attn.transfer.families import BiasTraits, NormTraits, RotaryTraits, Traits
from torch_ref import position_bias
from torch_ref import rotary as torch_rotary


def flax_module(traits: Traits, dtype: str) -> nnx.Module:
    """Our module, abstract: shapes and dtypes, no values. In eval mode."""
    (N, K, H), (kdim, vdim) = traits.sizes, traits.widths

    def module() -> nn.GroupedQueryAttention:
        rngs = nnx.Rngs(0)
        return nn.GroupedQueryAttention(
            traits.embed_dim,
            N,
            K,
            head_dim=H,
            kdim=kdim,
            vdim=vdim,
            use_bias=traits.use_bias,
            use_out_bias=traits.use_out_bias,
            scale=traits.scale,
            softcap=traits.softcap,
            qk_norm=None if traits.qk_norm is None else _flax_norm(traits.qk_norm),
            rotary=None if traits.rotary is None else _rotary(rotary, traits.rotary),
            position_bias=None if traits.bias is None else _flax_bias(traits.bias, N, dtype, rngs),
            dtype=dtype,
            param_dtype=dtype,
            rngs=rngs,
        )

    abstract = nnx.eval_shape(module)
    abstract.eval()
    return abstract


def flax_mask(traits: Traits, lengths: jax.Array) -> Mask:
    """What queries may see in rows of `lengths` (B,) tokens that are padded at the end."""
    mask = Mask.lengths(lengths)
    if traits.is_causal:
        mask &= Mask.causal()
    if traits.window is not None:
        mask &= Mask.window(traits.window - 1, None)
    return mask


def torch_module(traits: Traits) -> torch.nn.Module:
    """torch_ref's module, in float32 and eval mode."""
    (N, K, H), (kdim, vdim) = traits.sizes, traits.widths
    return torch_ref.DESIGNS["gqa"](
        traits.embed_dim,
        N,
        K,
        head_dim=H,
        kdim=kdim,
        vdim=vdim,
        bias=traits.use_bias,
        out_bias=traits.use_out_bias,
        scale=traits.scale,
        softcap=traits.softcap,
        qk_norm=None if traits.qk_norm is None else _torch_norm(traits.qk_norm),
        rotary=None if traits.rotary is None else _rotary(torch_rotary, traits.rotary),
        position_bias=None if traits.bias is None else _torch_bias(traits.bias, N),
    ).eval()


def torch_mask(traits: Traits, lengths: torch.Tensor, T: int, S: int | None = None) -> torch.Tensor:
    """The same for torch, (B, 1, T, S), True = attend; S defaults to T."""
    i, j = torch.arange(T)[:, None], torch.arange(T if S is None else S)
    visible = (j < lengths[:, None, None, None]) & (i >= 0)
    if traits.is_causal:
        visible = visible & (j <= i)
    if traits.window is not None:
        visible = visible & (j > i - traits.window)
    return visible


def _rotary(library: Any, traits: RotaryTraits) -> Any:
    scaling = None
    if traits.scaling is not None:
        name, fields = traits.scaling
        scaling = getattr(library, name)(**fields)
    return library.Rotary(traits.base, traits.dim, traits.interleaved, scaling)


def _flax_bias(bias: BiasTraits, num_heads: int, dtype: str, rngs: nnx.Rngs) -> Any:
    if bias.kind == "alibi":
        return Alibi(num_heads, **bias.fields)
    return nn.RelativeBias(num_heads, **bias.fields, param_dtype=dtype, rngs=rngs)


def _torch_bias(bias: BiasTraits, num_heads: int) -> Any:
    kind = position_bias.Alibi if bias.kind == "alibi" else position_bias.RelativeBias
    return kind(num_heads, **bias.fields)


def _flax_norm(norm: NormTraits) -> Any:
    if norm.kind == "rms":
        return partial(nnx.RMSNorm, epsilon=norm.epsilon)
    return partial(nnx.LayerNorm, use_fast_variance=False, epsilon=norm.epsilon)


def _torch_norm(norm: NormTraits) -> Any:
    kind = torch.nn.RMSNorm if norm.kind == "rms" else torch.nn.LayerNorm
    return partial(kind, eps=norm.epsilon)
