"""Traits of an attention block -> the block in either framework, and how each is called."""

from functools import partial
from typing import Any

import jax
import torch
from flax import nnx

import torch_ref
from jax_attn import nn
from jax_attn.attention import Alibi, Mask, rotary
from jax_attn.transfer.families.family import BiasTraits, NormTraits, Traits
from torch_ref import position_bias
from torch_ref import rotary as torch_rotary


def flax_module(traits: Traits, dtype: str) -> nnx.Module:
    """Our module, abstract: shapes and dtypes, no values. In eval mode."""
    N = traits.sizes.num_heads

    def module() -> nn.GroupedQueryAttention:
        rngs = nnx.Rngs(0)
        return nn.GroupedQueryAttention(
            **_shared_options(traits, rotary),
            use_bias=traits.use_bias,
            use_out_bias=traits.use_out_bias,
            qk_norm=None if traits.qk_norm is None else _flax_norm(traits.qk_norm),
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
    N = traits.sizes.num_heads
    return torch_ref.DESIGNS["gqa"](
        **_shared_options(traits, torch_rotary),
        bias=traits.use_bias,
        out_bias=traits.use_out_bias,
        qk_norm=None if traits.qk_norm is None else _torch_norm(traits.qk_norm),
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


def _shared_options(traits: Traits, library: Any) -> dict[str, Any]:
    """What both constructors call the same. library: whose rotary positions."""
    (N, K, H), (kdim, vdim), turning = traits.sizes, traits.widths, traits.rotary
    options: dict[str, Any] = {"embed_dim": traits.embed_dim, "kdim": kdim, "vdim": vdim}
    options |= {"num_heads": N, "num_kv_heads": K, "head_dim": H}
    options |= {"scale": traits.scale, "softcap": traits.softcap}
    options |= {"add_bias_kv": traits.add_bias_kv}
    if turning is not None:
        name, fields = turning.scaling or ("", {})
        scaling = getattr(library, name)(**fields) if name else None
        options["rotary"] = library.Rotary(turning.base, turning.dim, turning.interleaved, scaling)
    return options


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
