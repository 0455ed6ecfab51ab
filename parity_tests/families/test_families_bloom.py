"""BLOOM: transformers' own attention, biases and whole models against ours."""

from functools import cache

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    BloomForQuestionAnswering,
    BloomForSequenceClassification,
    BloomForTokenClassification,
    BloomModel,
)
from transformers.models.bloom.modeling_bloom import BloomAttention, build_alibi_tensor

from helpers.dtype_rows import in_dtypes
from helpers.families import family_mistakes as mistakes
from helpers.families.family_cases import BlockPair, T, roundtrip, scattered
from jax_attn.families import family_of
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


MODELS = [
    (BloomModel, {}),
    (BloomForCausalLM, {}),
    (BloomForCausalLM, {"tie_word_embeddings": False}),
    (BloomForSequenceClassification, {}),
    (BloomForTokenClassification, {}),
    (BloomForQuestionAnswering, {}),
]


@in_dtypes("model, options", MODELS, low=MODELS[:1])
def test_a_file_goes_there_and_back(model, options, dtype, tmp_path):
    made = scattered(model(BloomConfig(**SIZES, **options)), dtype)
    passed = roundtrip(made, tmp_path)
    is_tied = hasattr(made, "lm_head") and made.config.tie_word_embeddings
    name = "transformer.word_embeddings.weight"
    assert passed == ({"lm_head.weight": f"tied to {name}"} if is_tied else {})


def test_the_model_masks_and_biases_its_blocks_so():
    config = BloomConfig(**SIZES)
    seen = mistakes.given_to(BloomForCausalLM(config), PLACE)
    mistakes.assert_visible(
        seen["attention_mask"], family_of(config.to_dict()).traits(config.to_dict(), PLACE)
    )
    # Of the row without padding; test_position_bias.py holds theirs against ours.
    assert torch.equal(seen["alibi"][:N], build_alibi_tensor(torch.ones(1, T), N, torch.float32))


MISTAKES = {
    "key and value swapped": mistakes.swapped("k_proj", "v_proj"),
    "a square weight transposed": mistakes.but(row("dense.weight", "out_proj.kernel", heads_in)),
    "read one after another": mistakes.but(
        row("query_key_value.weight", QKV_KERNELS, packed, linear, heads),
        row("query_key_value.bias", QKV_BIASES, packed, heads),
    ),
    "without ALiBi": mistakes.otherwise(bias=None),
    "slopes 1% off": mistakes.otherwise(bias=BiasTraits("alibi", {"factor": 1.01})),
    "slopes divided by the scale": mistakes.otherwise(
        bias=BiasTraits("alibi", {"factor": H**-0.5})
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_seen(mistake):
    mistakes.assert_seen(MISTAKES[mistake], block())
