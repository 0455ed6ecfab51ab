"""GPT-NeoX: transformers' own attention and files against ours; heads by turns, in part turned."""

from functools import cache

import pytest
import torch
import transformers
from transformers import GPTNeoXConfig
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXAttention, GPTNeoXRotaryEmbedding

from helpers.dtype_rows import in_dtypes
from helpers.families import family_mistakes as mistakes
from helpers.families.decoder_cases import Turned, drawn, turning
from jax_attn import transfer
from jax_attn.families.gpt_neox import GPT_NEOX
from jax_attn.families.traits import RotaryTraits
from jax_attn.transfer import heads, heads_in, linear, packed, row
from jax_attn.transfer.table.layouts import QKV_BIASES, QKV_KERNELS

SIZES = {
    "vocab_size": 17,
    "hidden_size": 60,
    "num_attention_heads": 6,
    "intermediate_size": 37,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
    "rotary_pct": 0.4,
    "attn_implementation": "eager",
}
LAST = "gpt_neox.layers.1.attention"
# name -> what the config says besides
CASES = {
    "two fifths turned": {},
    "all turned, no biases": {"rotary_pct": 1.0, "attention_bias": False},
    "three fifths turned, scaled": {
        "rope_parameters": {"rope_type": "linear", "factor": 4.0, "partial_rotary_factor": 0.6}
    },
}

# Of the first the outputs are compared below, beside mistakes.
USUAL = ("three fifths turned, scaled",)


@cache
def block(name, dtype="float32") -> Turned:
    config = GPTNeoXConfig(**{**SIZES, **CASES[name]})

    def theirs(module, x, mask, positions):
        turned = GPTNeoXRotaryEmbedding(config)(x, positions)  # see `Turned`
        return module(x, mask, position_embeddings=turned)[0]

    return Turned.of(drawn(GPTNeoXAttention(config, layer_idx=1)), config, LAST, theirs, dtype)


@in_dtypes("name", USUAL, long=[name for name in CASES if name not in USUAL])
def test_a_block_agrees_with_transformers(name, dtype):
    block(name, dtype).check().raise_for_status()


MISTAKES = {
    "key and value swapped": mistakes.swapped("k_proj", "v_proj"),
    "query and key swapped": mistakes.swapped("q_proj", "k_proj"),
    "read one after another": mistakes.but(
        row("query_key_value.weight", QKV_KERNELS, packed, linear, heads),
        row("query_key_value.bias", QKV_BIASES, packed, heads),
    ),
    "biases read one after another": mistakes.but(
        row("query_key_value.bias", QKV_BIASES, packed, heads)
    ),
    "a square weight transposed": mistakes.but(row("dense.weight", "out_proj.kernel", heads_in)),
    "a fifth turned": turning(dim=2),
    "another base": turning(base=1.01e4),
    "another scale": mistakes.otherwise(scale=11**-0.5),
}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_seen(mistake):
    mistakes.assert_seen(MISTAKES[mistake], block("two fifths turned"))


def test_the_file_spells_the_head_otherwise_than_the_live_module(tmp_path):
    model = transformers.GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES))
    model.save_pretrained(tmp_path)
    file = transfer.load_checkpoint(tmp_path / "model.safetensors")
    assert set(file) ^ set(model.state_dict()) == {"embed_out.weight", "lm_head.weight"}


def test_what_old_files_hold_besides_is_passed_over():
    names = ("bias", "masked_bias", "rotary_emb.inv_freq")
    tensors = {f"gpt_neox.layers.0.attention.{name}": torch.ones(5) for name in names}
    layout = GPT_NEOX.model(GPTNeoXConfig(**SIZES).to_dict(), tensors)
    assert layout.to_flax(tensors, {}) == {}


def test_what_a_config_does_not_say_is_transformers_default():
    made = GPT_NEOX.traits({"model_type": "gpt_neox"}, LAST)
    assert made == GPT_NEOX.traits(GPTNeoXConfig().to_dict(), LAST)
    assert made.rotary == RotaryTraits(dim=24)
