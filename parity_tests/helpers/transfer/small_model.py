"""A user's own small model, its table and its torch tensors, for the tests of transfer."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from jax_attn import transfer
from jax_attn.transfer import EMBEDDING, LAYER_NORM, LINEAR, TransferError

N, K, H, D = 6, 3, 5, 30
VOCAB, WIDE, NARROW, LAYERS = 11, 13, 7, 3


class Block(nnx.Module):
    def __init__(self, rngs, dtype):
        self.attn = nnx.MultiHeadAttention(
            N, D, num_kv_heads=K, decode=False, param_dtype=dtype, rngs=rngs
        )
        self.norm = nnx.LayerNorm(D, param_dtype=dtype, rngs=rngs)
        self.up = nnx.Linear(D, WIDE, use_bias=False, param_dtype=dtype, rngs=rngs)


class Model(nnx.Module):
    """A user's own small model: nothing in it is known to the package."""

    def __init__(self, layers=LAYERS, dtype=jnp.float32):
        rngs = nnx.Rngs(0)
        self.tokens = nnx.Embed(VOCAB, D, param_dtype=dtype, rngs=rngs)
        self.layers = nnx.List([Block(rngs, dtype) for _ in range(layers)])
        self.running = nnx.BatchStat(jnp.zeros(D))  # no parameter: none of a transfer's business


ATTENTION = transfer.LAYOUTS["gqa"].renamed(transfer.FLAX_NAMES)
MODEL = (
    EMBEDDING.under("wte", "tokens")
    + ATTENTION.under("h.{layer}.self_attention", "layers.{layer}.attn")
    + LAYER_NORM.under("h.{layer}.ln", "layers.{layer}.norm")
    + LINEAR.under("h.{layer}.mlp.up", "layers.{layer}.up")
)


def torch_tensors(layers=LAYERS, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = {"wte.weight": (VOCAB, D)}
    for i in range(layers):
        shapes |= {
            f"h.{i}.self_attention.q_proj.weight": (N * H, D),
            f"h.{i}.self_attention.q_proj.bias": (N * H,),
            f"h.{i}.self_attention.k_proj.weight": (K * H, D),
            f"h.{i}.self_attention.k_proj.bias": (K * H,),
            f"h.{i}.self_attention.v_proj.weight": (K * H, D),
            f"h.{i}.self_attention.v_proj.bias": (K * H,),
            f"h.{i}.self_attention.out_proj.weight": (D, N * H),
            f"h.{i}.self_attention.out_proj.bias": (D,),
            f"h.{i}.ln.weight": (D,),
            f"h.{i}.ln.bias": (D,),
            f"h.{i}.mlp.up.weight": (WIDE, D),
        }
    return {key: torch.randn(s, generator=generator).to(dtype) for key, s in shapes.items()}


def model(**options):
    return nnx.eval_shape(lambda: Model(**options))


def bits(module):
    return {path: np.asarray(array).tobytes() for path, array in transfer.flatten(module).items()}


def problems_of(act):
    with pytest.raises(TransferError) as error:
        act()
    return [(p.kind, p.name) for p in error.value.problems], str(error.value)


def counting(shapes):
    """Arrays that hold every number once, so that any misplacement shows."""
    starts = np.cumsum([0, *(int(np.prod(shape)) for shape in shapes)])
    return [
        np.arange(start, stop, dtype=np.float32).reshape(shape)
        for start, stop, shape in zip(starts, starts[1:], shapes, strict=False)
    ]
