"""Llama, Mistral, Qwen2, Qwen3: transformers' own attention against ours, through the table."""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3

from jax_attn import parity, transfer
from jax_attn.parity import rebuild
from jax_attn.parity.compare import Verdict
from jax_attn.transfer.families import family_of

B, T, N, K, H = 2, 13, 6, 3, 10
D = 48  # not N·H: a transposed square would go unseen
SIZES = {
    "hidden_size": D,
    "num_attention_heads": N,
    "num_key_value_heads": K,
    "head_dim": H,
    "num_hidden_layers": 2,
    "attn_implementation": "eager",
}
# name -> (config, its module's file, the attention's class)
CASES = {
    "llama": (LlamaConfig(**SIZES), modeling_llama, "LlamaAttention"),
    "llama with biases": (
        LlamaConfig(**SIZES, attention_bias=True),
        modeling_llama,
        "LlamaAttention",
    ),
    "mistral with a window": (
        MistralConfig(**SIZES, sliding_window=5),
        modeling_mistral,
        "MistralAttention",
    ),
    "qwen2": (Qwen2Config(**SIZES), modeling_qwen2, "Qwen2Attention"),
    "qwen3": (Qwen3Config(**SIZES), modeling_qwen3, "Qwen3Attention"),
}


def pair(name, dtype="float32"):
    """transformers' block, ours with its weights, traits and table."""
    config, file, kind = CASES[name]
    torch.manual_seed(0)
    reference = getattr(file, kind)(config, layer_idx=1).to(getattr(torch, dtype)).eval()
    family = family_of(config.to_dict())
    traits = family.traits(config.to_dict(), "model.layers.1.self_attn")
    layout = family.block(config.to_dict())
    port = rebuild.flax_module(traits, dtype)
    transfer.load(port, reference.state_dict(), layout)
    return (
        reference,
        port,
        traits,
        layout,
        getattr(file, f"{kind.removesuffix('Attention')}RotaryEmbedding")(config),
    )


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_agrees_with_transformers(name, dtype):
    reference, port, traits, layout, angles = pair(name, dtype)

    def theirs(module, x, lengths):
        mask = rebuild.torch_mask(traits, lengths, T)
        added = torch.where(mask, 0.0, torch.finfo(x.dtype).min).to(x.dtype)
        turned = angles(x, torch.arange(T)[None])
        return module(x, turned, added)[0]

    def ours(module, x, lengths):
        return module(x, mask=rebuild.flax_mask(traits, lengths))

    given = {
        "x": np.random.default_rng(0).standard_normal((B, T, D)),
        # A query beyond its row and the window sees nothing: transformers then gives the mean.
        "lengths": np.array([T, T - 4], np.int32),
    }
    result = parity.check(
        reference,
        port,
        given,
        layout=layout,
        reference_call=theirs,
        port_call=ours,
        dtype=dtype,
        transforms=("jit",),
    )
    assert result.verdict is Verdict.PASS, str(result)
