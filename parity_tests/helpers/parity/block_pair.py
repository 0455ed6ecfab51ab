"""A pair that a user brings, for the tests of `check`: a pre-norm block in both frameworks."""

import jax.numpy as jnp
import torch
from flax import nnx

from jax_attn import MultiHeadAttention
from jax_attn.attention import Mask
from jax_attn.transfer import LAYER_NORM, LAYOUTS, LINEAR, Layout, load

B, T, D, N, F = 2, 7, 30, 6, 11

LAYOUT = Layout(
    LAYER_NORM.under("norm", "norm"),
    LAYOUTS["torch_mha"].under("attention", "attention"),
    LINEAR.under("head", "head"),
)


class TorchBlock(torch.nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.norm = torch.nn.LayerNorm(D)
        self.attention = torch.nn.MultiheadAttention(D, N, dropout=dropout, batch_first=True)
        self.head = torch.nn.Linear(D, F)

    def forward(self, x, ignored=None):
        y = self.norm(x)
        y, _ = self.attention(y, y, y, key_padding_mask=ignored, need_weights=False)
        return self.head(torch.tanh(x + y))


class FlaxBlock(nnx.Module):
    def __init__(self, dtype=jnp.float32):
        options = {"dtype": dtype, "param_dtype": dtype, "rngs": nnx.Rngs(0)}
        self.norm = nnx.LayerNorm(D, epsilon=1e-5, use_fast_variance=False, **options)
        self.attention = MultiHeadAttention(D, N, **options)
        self.head = nnx.Linear(D, F, **options)

    def __call__(self, x, ignored=None):
        mask = None if ignored is None else Mask.from_torch_mha(key_padding_mask=ignored)
        y = self.attention(self.norm(x), mask=mask)
        return self.head(jnp.tanh(x + y))


def pair(dtype: str = "float32", port: type[nnx.Module] = FlaxBlock, **options):
    """Both sides with the same weights, the biases and the norm's weights not at their 0 and 1."""
    torch.manual_seed(0)
    reference = TorchBlock(**options).eval()
    with torch.no_grad():
        for p in reference.parameters():
            p.add_(0.2 * torch.randn_like(p))
    reference = reference.to(getattr(torch, dtype))
    # Every weight is loaded: jax's own draws would be compiled, shape by shape.
    ported = nnx.eval_shape(lambda: port(jnp.dtype(dtype)))
    load(ported, reference.state_dict(), LAYOUT)
    return reference, ported
