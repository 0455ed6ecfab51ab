"""Build an attention block from its traits in either framework, and the masks for its calls."""

from functools import partial
from typing import Any

import jax
import torch
from flax import nnx

import torch_ref
from jax_attn.attention import Mask
from jax_attn.families.traits import BiasTraits, NormTraits, Traits
from jax_attn.models.attention import attention, shared_options
from torch_ref import position_bias
from torch_ref import rotary as torch_rotary


def flax_module(traits: Traits, dtype: str) -> nnx.Module:
    """Build our module in eval mode, abstract: with shapes and dtypes but no values."""
    make = partial(attention, traits, dtype=dtype, param_dtype=dtype)
    abstract = nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0)))
    abstract.eval()
    return abstract


def flax_mask(traits: Traits, lengths: jax.Array) -> Mask:
    """Build the mask for rows of `lengths` (B,) tokens that are padded at the end."""
    mask = Mask.lengths(lengths)
    if traits.is_causal:
        mask &= Mask.causal()
    if traits.window is not None:
        mask &= Mask.window(traits.window - 1, None)
    return mask


def torch_module(traits: Traits) -> torch.nn.Module:
    """Build torch_ref's module, in float32 and eval mode."""
    N = traits.sizes.num_heads
    return torch_ref.DESIGNS["gqa"](
        **shared_options(traits, torch_rotary),
        bias=traits.use_bias,
        out_bias=traits.use_out_bias,
        qk_norm=None if traits.qk_norm is None else _torch_norm(traits.qk_norm),
        position_bias=None if traits.bias is None else _torch_bias(traits.bias, N),
    ).eval()


def torch_mask(traits: Traits, lengths: torch.Tensor, T: int, S: int | None = None) -> torch.Tensor:
    """Build the mask of `flax_mask` for torch, (B, 1, T, S), True = attend; S defaults to T."""
    i, j = torch.arange(T)[:, None], torch.arange(T if S is None else S)
    visible = (j < lengths[:, None, None, None]) & (i >= 0)
    if traits.is_causal:
        visible = visible & (j <= i)
    if traits.window is not None:
        visible = visible & (j > i - traits.window)
    return visible


def _torch_bias(bias: BiasTraits, num_heads: int) -> Any:
    kind = position_bias.Alibi if bias.kind == "alibi" else position_bias.RelativeBias
    return kind(num_heads, **bias.fields)


def _torch_norm(norm: NormTraits) -> Any:
    rms = _OneMore if norm.adds_one else torch.nn.RMSNorm
    return partial(rms if norm.kind == "rms" else torch.nn.LayerNorm, eps=norm.epsilon)


class _OneMore(torch.nn.RMSNorm):
    """Gemma's RMS norm, whose scale is 1 + the weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.weight is not None
        return torch.nn.functional.rms_norm(x, self.normalized_shape, 1 + self.weight, self.eps)
