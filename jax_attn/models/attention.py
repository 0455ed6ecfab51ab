"""Modules of this package for the traits of an attention block."""

from functools import partial
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jax_attn.attention import Alibi, rotary
from jax_attn.families.traits import BiasTraits, Traits
from jax_attn.models.norm import Norm
from jax_attn.nn import GroupedQueryAttention, RelativeBias


def attention(
    traits: Traits,
    *,
    dtype: DTypeLike | None = None,
    param_dtype: DTypeLike = jnp.float32,
    rngs: nnx.Rngs,
) -> GroupedQueryAttention:
    """Return the block's attention module; the caller adds masks for `is_causal` and `window`."""
    bias, norm = traits.bias, traits.qk_norm
    return GroupedQueryAttention(
        **shared_options(traits, rotary),
        use_bias=traits.use_bias,
        use_out_bias=traits.use_out_bias,
        qk_norm=None if norm is None else partial(Norm, traits=norm),
        position_bias=None if bias is None else _bias(bias, traits, param_dtype, rngs),
        dtype=dtype,
        param_dtype=param_dtype,
        rngs=rngs,
    )


def shared_options(traits: Traits, library: Any) -> dict[str, Any]:
    """Return the options that this package and torch's reference designs name alike.

    library: the module with `Rotary` and its scalings.
    """
    (N, K, H), (kdim, vdim), turning = traits.sizes, traits.widths, traits.rotary
    options: dict[str, Any] = {"embed_dim": traits.embed_dim, "kdim": kdim, "vdim": vdim}
    options |= {"num_heads": N, "num_kv_heads": K, "head_dim": H}
    options |= {"scale": traits.scale, "softcap": traits.softcap}
    options |= {"add_bias_kv": traits.add_bias_kv, "sinks": traits.sinks}
    if turning is not None:
        name, fields = turning.scaling or ("", {})
        scaling = getattr(library, name)(**fields) if name else None
        options["rotary"] = library.Rotary(turning.base, turning.dim, turning.interleaved, scaling)
    return options


def _bias(bias: BiasTraits, traits: Traits, dtype: DTypeLike, rngs: nnx.Rngs) -> Any:
    N = traits.sizes.num_heads
    if bias.kind == "alibi":
        return Alibi(N, **bias.fields)
    return RelativeBias(N, **bias.fields, param_dtype=dtype, rngs=rngs)
