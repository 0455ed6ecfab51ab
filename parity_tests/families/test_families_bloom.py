"""BLOOM: transformers' own attention, biases and whole models against ours."""

from functools import cache

import pytest
import torch
from transformers import BloomConfig
from transformers.models.bloom.modeling_bloom import BloomAttention, build_alibi_tensor

from helpers.families import family_mistakes as mistakes
from helpers.families.family_cases import BlockPair
from jax_attn.families.traits import BiasTraits
from jax_attn.transfer.table.layouts import QKV_BIASES, QKV_KERNELS
from jax_attn.transfer.table.rows import row
from jax_attn.transfer.table.steps import heads, heads_in, linear, packed

N, H = 6, 5  # no power of two: slopes of two kinds
SIZES = {
    "hidden_size": N * H,
    "n_head": N,
    "n_layer": 2,
    "vocab_size": 17,
    "attn_implementation": "eager",
}
PLACE = "transformer.h.1.self_attention"


@cache
def block(dtype="float32"):
    config = BloomConfig(**SIZES)
    torch.manual_seed(0)
    reference = BloomAttention(config, layer_idx=1)
    for parameter in reference.parameters():
        torch.nn.init.normal_(parameter, std=0.3)

    def theirs(module, x, added):
        real = (added[:, 0, -1] > torch.finfo(x.dtype).min / 2).long()
        slopes = build_alibi_tensor(real, N, x.dtype)
        return module(x, torch.zeros_like(x), slopes, added)[0]

    return BlockPair.of(reference, config, PLACE, theirs, dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_block_agrees_with_transformers(dtype):
    block(dtype).check().raise_for_status()


MISTAKES = {
    "key and value swapped": mistakes.swapped("k_proj", "v_proj"),
    "a square weight transposed": mistakes.but(row("dense.weight", "out_proj.kernel", heads_in)),
    "read one after another": mistakes.but(
        row("query_key_value.weight", QKV_KERNELS, packed, linear, heads),
        row("query_key_value.bias", QKV_BIASES, packed, heads),
    ),
    "slopes 1% off": mistakes.otherwise(bias=BiasTraits("alibi", {"factor": 1.01})),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_seen(mistake):
    mistakes.assert_seen(MISTAKES[mistake], block())
