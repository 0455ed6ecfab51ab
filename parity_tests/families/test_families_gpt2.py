"""GPT-2 and GPTBigCode: transformers' own attention and whole models against ours."""

from functools import cache

import pytest
import torch
from transformers import GPT2Config, GPT2Model, GPTBigCodeConfig
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
from transformers.models.gpt_bigcode.modeling_gpt_bigcode import GPTBigCodeAttention

from helpers.dtype_rows import in_dtypes
from helpers.families import family_mistakes as mistakes
from helpers.families.family_cases import BlockPair
from jax_attn.families import family_of
from jax_attn.transfer.table.layouts import QKV_BIASES, QKV_KERNELS
from jax_attn.transfer.table.rows import row
from jax_attn.transfer.table.steps import grouped, heads, heads_in, inward, linear, packed

N, H = 6, 5
SIZES = {
    "n_embd": N * H,
    "n_head": N,
    "n_layer": 2,
    "n_inner": 37,
    "n_positions": 11,
    "vocab_size": 17,
    "attn_implementation": "eager",
}
GPT2_KINDS = (GPT2Config, GPT2Attention)
BIGCODE_KINDS = (GPTBigCodeConfig, GPTBigCodeAttention)
CASES = {
    "gpt2": (GPT2_KINDS, {}),
    "gpt2, deeper layers flatter": (GPT2_KINDS, {"scale_attn_by_inverse_layer_idx": True}),
    "gpt2 without a scale": (GPT2_KINDS, {"scale_attn_weights": False}),
    "gpt_bigcode": (BIGCODE_KINDS, {}),
    "gpt_bigcode head by head": (BIGCODE_KINDS, {"multi_query": False}),
}
# The others differ from these by a number.
APART = ("gpt2", "gpt_bigcode", "gpt_bigcode head by head")


@cache
def block(name, dtype="float32"):
    (config, attention), options = CASES[name]
    made = config(**SIZES, **options)
    torch.manual_seed(0)
    reference = attention(made, layer_idx=1)
    # Conv1D's biases are 0, its weights tiny; larger ones leave bfloat16 no power without a scale.
    for parameter in reference.parameters():
        torch.nn.init.normal_(parameter, std=0.2)

    def theirs(module, x, added):
        return module(x, attention_mask=added)[0]

    return BlockPair.of(reference, made, "transformer.h.1.attn", theirs, dtype)


@in_dtypes("name", APART, long=[name for name in CASES if name not in APART])
def test_a_block_agrees_with_transformers(name, dtype):
    block(name, dtype).check().raise_for_status()


def test_old_files_masks_are_passed_over():
    config = GPT2Config(**SIZES).to_dict()
    model = GPT2Model(GPT2Config(**SIZES))
    old = {f"h.{i}.attn.{name}": torch.ones(1) for i in (0, 1) for name in ("bias", "masked_bias")}
    layout = family_of(config).model(config, {**model.state_dict(), **old})
    sizes = family_of(config).traits(config, "h.0.attn").sizes
    shapes = {key: tuple(x.shape) for key, x in model.state_dict().items()}
    with_masks = shapes | {key: tuple(x.shape) for key, x in old.items()}
    assert layout.shapes(with_masks, sizes) == layout.shapes(shapes, sizes)


# what is wrong -> (the case, how its port is made)
MISTAKES = {
    "query and key swapped": ("gpt2", mistakes.swapped("q_proj", "k_proj")),
    "a square weight transposed": (
        "gpt2",
        mistakes.but(row("c_proj.weight", "out_proj.kernel", linear, heads_in)),
    ),
    "packed read head by head": (
        "gpt2",
        mistakes.but(
            row("c_attn.weight", QKV_KERNELS, linear, grouped, inward),
            row("c_attn.bias", QKV_BIASES, grouped),
        ),
    ),
    "the scale 1% off": ("gpt2", mistakes.otherwise(scale=1.01 * H**-0.5)),
    "with a scale": ("gpt2 without a scale", mistakes.otherwise(scale=None)),
    "key and value swapped": ("gpt_bigcode", mistakes.swapped("k_proj", "v_proj")),
    "read one after another": (
        "gpt_bigcode head by head",
        mistakes.but(
            row("c_attn.weight", QKV_KERNELS, packed, linear, heads),
            row("c_attn.bias", QKV_BIASES, packed, heads),
        ),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_seen(mistake):
    name, mistaken = MISTAKES[mistake]
    mistakes.assert_seen(mistaken, block(name))
