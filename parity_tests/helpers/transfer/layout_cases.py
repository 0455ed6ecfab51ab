"""Every port that a table has to make: a torch design, and the Flax module it goes into."""

from types import SimpleNamespace

import jax.numpy as jnp
import torch
from flax import nnx

import torch_ref
from jax_attn import nn
from jax_attn.transfer import FLAX_NAMES, LAYOUTS

B, T, N, K, H, D = 2, 5, 6, 3, 5, 30
HEAD_DIM, KDIM, VDIM = 7, 11, 13


def split(*names):
    """q, k, v of a design with one Linear each."""
    return lambda m, x, k, v: tuple(
        getattr(m, name)(array) for name, array in zip(names, (x, k, v), strict=True)
    )


def fused(m, x, k, v):
    """The published form: (B, T, 3, N, H), cut along the third axis."""
    return m.qkv_proj(x).reshape(*x.shape[:2], 3, -1).unbind(2)


def torch_packed(m, x, k, v):
    return torch.nn.functional._in_projection_packed(x, x, x, m.in_proj_weight, m.in_proj_bias)


def torch_apart(m, x, k, v):
    biases = (None,) * 3 if m.in_proj_bias is None else m.in_proj_bias.chunk(3)
    weights = (m.q_proj_weight, m.k_proj_weight, m.v_proj_weight)
    return tuple(map(torch.nn.functional.linear, (x, k, v), weights, biases))


def flax_mha(**options):
    return lambda dtype: nnx.MultiHeadAttention(
        N, D, decode=False, rngs=nnx.Rngs(0), param_dtype=dtype, **options
    )


def ours(kv_heads=N, **options):
    return lambda dtype: nn.GroupedQueryAttention(
        D, N, kv_heads, rngs=nnx.Rngs(0), param_dtype=dtype, **options
    )


def case(design, q_k_v, out, *args, flax=None, names=None, widths=(D, D, D), **options):
    """One port: a torch design, how it projects, and the Flax module it goes into."""
    return SimpleNamespace(
        design=design,
        torch=lambda: torch_ref.DESIGNS[design](D, N, *args, **options),
        q_k_v=q_k_v,
        out=out,
        flax=flax or ours(),
        names=names or {},
        widths=widths,
    )


WEIGHTS, MASKED, PLAIN, GQA = (
    split("w_q", "w_k", "w_v"),
    split("W_Q", "W_K", "W_V"),
    split("query", "key", "value"),
    split("q_proj", "k_proj", "v_proj"),
)
CASES = {
    "weights_mha": case("weights_mha", WEIGHTS, "w_o"),
    "fused_mha": case("fused_mha", fused, "out_proj"),
    "masked_mha": case("masked_mha", MASKED, "W_O"),
    "mqa": case("mqa", MASKED, "W_O", flax=ours(1)),
    "plain_mha": case("plain_mha", PLAIN, "out"),
    "torch_mha": case("torch_mha", torch_packed, "out_proj"),
    "torch_mha without bias": case(
        "torch_mha", torch_packed, "out_proj", flax=ours(use_bias=False), bias=False
    ),
    "torch_mha with kdim and vdim": case(
        "torch_mha",
        torch_apart,
        "out_proj",
        flax=ours(kdim=KDIM, vdim=VDIM),
        widths=(D, KDIM, VDIM),
        kdim=KDIM,
        vdim=VDIM,
    ),
    "torch_mha with vdim, without bias": case(
        "torch_mha",
        torch_apart,
        "out_proj",
        flax=ours(vdim=VDIM, use_bias=False),
        widths=(D, D, VDIM),
        vdim=VDIM,
        bias=False,
    ),
    "torch_mha with a learned key": case(
        "torch_mha", torch_packed, "out_proj", flax=ours(add_bias_kv=True), add_bias_kv=True
    ),
    "gqa": case("gqa", GQA, "out_proj", K, flax=ours(K)),
    "gqa of other widths": case(
        "gqa",
        GQA,
        "out_proj",
        K,
        flax=ours(K, head_dim=HEAD_DIM, kdim=KDIM, vdim=VDIM),
        widths=(D, KDIM, VDIM),
        head_dim=HEAD_DIM,
        kdim=KDIM,
        vdim=VDIM,
    ),
    "gqa with a bias on the inputs only": case(
        "gqa", GQA, "out_proj", K, flax=ours(K, use_out_bias=False), out_bias=False
    ),
    "gqa with a learned key and sinks": case(
        "gqa",
        GQA,
        "out_proj",
        K,
        flax=ours(K, add_bias_kv=True, sinks=True),
        add_bias_kv=True,
        sinks=True,
    ),
    "gqa with RMSNorm on queries and keys": case(
        "gqa", GQA, "out_proj", K, flax=ours(K, qk_norm=nnx.RMSNorm), qk_norm=torch.nn.RMSNorm
    ),
    "gqa with LayerNorm on queries and keys": case(
        "gqa", GQA, "out_proj", K, flax=ours(K, qk_norm=nnx.LayerNorm), qk_norm=torch.nn.LayerNorm
    ),
    "masked_mha into flax's own": case(
        "masked_mha", MASKED, "W_O", flax=flax_mha(), names=FLAX_NAMES
    ),
    "torch_mha into flax's own": case(
        "torch_mha", torch_packed, "out_proj", flax=flax_mha(), names=FLAX_NAMES
    ),
    "mqa into flax's own": case(
        "mqa", MASKED, "W_O", flax=flax_mha(num_kv_heads=1), names=FLAX_NAMES
    ),
    "gqa into flax's own": case(
        "gqa", GQA, "out_proj", K, flax=flax_mha(num_kv_heads=K), names=FLAX_NAMES
    ),
}


def abstract(build, dtype=jnp.float32):
    """The module's shapes without its initialisation, which a transfer replaces anyway."""
    return nnx.eval_shape(lambda: build(dtype))


def table(port):
    layout = LAYOUTS[port.design]
    return layout.renamed(port.names) if port.names else layout
