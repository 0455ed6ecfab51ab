"""A block as users write them, in both frameworks: attention and an MLP behind norms.

Torch attends by its own fused function, the port by whichever kernel is asked for; what the check
knows of either is what it is given.
"""

from typing import Any

import jax
import torch
from flax import nnx
from torch.nn import functional

from jax_attn.nn import GroupedQueryAttention
from jax_attn.nn.projection import project
from jax_attn.parity.matrix.cases import Size
from jax_attn.transfer import LAYER_NORM, LAYOUTS, LINEAR, Layout

LAYOUT = Layout(
    LAYER_NORM.under("attention_norm", "attention_norm"),
    LAYOUTS["gqa"].under("attention", "attention"),
    LAYER_NORM.under("mlp_norm", "mlp_norm"),
    LINEAR.under("up", "up"),
    LINEAR.under("down", "down"),
)
_EPSILON, _WIDER = 1e-5, 2


class TorchAttention(torch.nn.Module):
    def __init__(self, size: Size):
        super().__init__()
        self.heads, self.kv_heads = size.N, size.K
        H = size.D // size.N
        self.q_proj = torch.nn.Linear(size.D, size.N * H)
        self.k_proj = torch.nn.Linear(size.D, size.K * H)
        self.v_proj = torch.nn.Linear(size.D, size.K * H)
        self.out_proj = torch.nn.Linear(size.N * H, size.D)

    def forward(self, x: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
        q_BNTH = self.q_proj(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k_BKSH, v_BKSH = (
            project(x).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2)
            for project in (self.k_proj, self.v_proj)
        )
        k_BNSH, v_BNSH = (
            a.repeat_interleave(self.heads // self.kv_heads, dim=1) for a in (k_BKSH, v_BKSH)
        )
        y_BNTH = functional.scaled_dot_product_attention(q_BNTH, k_BNSH, v_BNSH, attn_mask=allowed)
        return self.out_proj(y_BNTH.transpose(1, 2).flatten(2))


class TorchBlock(torch.nn.Module):
    """(B, T, D) and who sees whom, (B, N, T, T) -> (B, T, D)."""

    def __init__(self, size: Size):
        super().__init__()
        self.attention_norm = torch.nn.LayerNorm(size.D, eps=_EPSILON)
        self.attention = TorchAttention(size)
        self.mlp_norm = torch.nn.LayerNorm(size.D, eps=_EPSILON)
        self.up = torch.nn.Linear(size.D, _WIDER * size.D)
        self.down = torch.nn.Linear(_WIDER * size.D, size.D)

    def forward(self, x: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), allowed)
        return x + self.down(functional.gelu(self.up(self.mlp_norm(x))))


class Linear(nnx.Linear):
    """Its bias is added in float32: flax's own, in bfloat16 and float16, sums that bias's gradient
    in the dtype itself, each partial sum rounded: of ten rows already three times as far off.
    """

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        assert self.bias is not None
        return project(inputs, self.kernel[...], self.bias[...], axes=1)


class FlaxBlock(nnx.Module):
    """The same."""

    def __init__(self, size: Size, dtype: str, rngs: nnx.Rngs):
        options: dict[str, Any] = {"dtype": dtype, "param_dtype": dtype, "rngs": rngs}
        norm: dict[str, Any] = {"epsilon": _EPSILON, "use_fast_variance": False, **options}
        self.attention_norm = nnx.LayerNorm(size.D, **norm)
        self.attention = GroupedQueryAttention(size.D, size.N, size.K, **options)
        self.mlp_norm = nnx.LayerNorm(size.D, **norm)
        self.up = Linear(size.D, _WIDER * size.D, **options)
        self.down = Linear(_WIDER * size.D, size.D, **options)

    def __call__(self, x: jax.Array, allowed: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x), mask=allowed)
        return x + self.down(jax.nn.gelu(self.up(self.mlp_norm(x)), approximate=False))


def call(module: Any, x: Any, allowed: Any) -> Any:
    """How either side is called."""
    return module(x, allowed)
