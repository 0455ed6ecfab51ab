"""T5, mT5 and UMT5: transformers' own attention, biases and whole models against ours."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from flax import nnx
from transformers import (
    MT5Config,
    T5Config,
    T5ForConditionalGeneration,
    T5Model,
    UMT5Config,
)
from transformers.models.mt5.modeling_mt5 import MT5Attention
from transformers.models.t5.modeling_t5 import T5Attention
from transformers.models.umt5.modeling_umt5 import UMT5Attention

from helpers.dtype_rows import in_dtypes
from helpers.families import family_mistakes as mistakes
from helpers.families.family_cases import B, BlockPair, T, added
from jax_attn import transfer
from jax_attn.attention import Mask
from jax_attn.families import family_of
from jax_attn.families.traits import BiasTraits
from jax_attn.porting.verify import rebuild
from jax_attn.transfer.table.rows import row
from jax_attn.transfer.table.steps import heads_in

N, H, S = 3, 10, 5
SIZES = {
    "num_heads": N,
    "d_kv": H,
    "d_ff": 37,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "vocab_size": 17,
    # Distances of up to T − 1 fall into near and far buckets, and none onto a bound.
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 11,
    "attn_implementation": "eager",
}
ENCODER = "encoder.block.0.layer.0.SelfAttention"
DECODER = "decoder.block.0.layer.0.SelfAttention"
LATER = "decoder.block.1.layer.0.SelfAttention"
CROSS = "decoder.block.1.layer.1.EncDecAttention"


class CrossBlock(BlockPair):
    """Queries of one sequence, keys and values of another."""

    @property
    def inputs(self):
        rng = np.random.default_rng(0)
        x, memory = (rng.standard_normal((B, n, self.traits.embed_dim)) for n in (T, S))
        return {"x": x, "memory": memory, "lengths": np.array([S, S - 2], np.int32)}

    def call_reference(self, module, x, memory, lengths):
        visible = (torch.arange(S) < lengths[:, None])[:, None, None]
        return module(x, key_value_states=memory, mask=added(visible, x.dtype))[0]

    def call_port(self, module, x, memory, lengths):
        return module(x, memory, mask=Mask.lengths(lengths))


def theirs(module, x, added):
    return module(x, mask=added)[0]


def umt5s(module, x, added):
    return module(x, attention_mask=added)[0]


# name -> (config, attention, prefix, D, how it is called)
CASES = {
    "encoder": (T5Config, T5Attention, ENCODER, 31, theirs),
    "decoder": (T5Config, T5Attention, DECODER, 31, theirs),
    "cross": (T5Config, T5Attention, CROSS, 31, None),
    "mt5": (MT5Config, MT5Attention, ENCODER, 31, theirs),
    "umt5, a later block": (UMT5Config, UMT5Attention, LATER, 31, umt5s),
    "square": (T5Config, T5Attention, ENCODER, N * H, theirs),
}
USUAL = ("encoder", "decoder", "cross", "umt5, a later block")


@cache
def block(name, dtype="float32"):
    config, attention, place, width, how = CASES[name]
    made = config(**SIZES, d_model=width, is_decoder=place.startswith("decoder"))
    torch.manual_seed(0)
    reference = attention(made, has_relative_attention_bias=place != CROSS, layer_idx=1)
    kind = CrossBlock if place == CROSS else BlockPair
    return kind.of(reference, made, place, how, dtype)


@pytest.mark.slow
@in_dtypes("name", USUAL, low=("decoder",), long=("mt5",))
def test_a_block_agrees_with_transformers(name, dtype):
    block(name, dtype).check().raise_for_status()


def test_a_head_of_its_own_is_read():
    """As T5 1.1 has it; transformers 5 builds none, but writes what such a file's config said."""
    config = T5Config(**SIZES, d_model=31, tie_word_embeddings=False)
    model = T5ForConditionalGeneration(config)
    head = torch.randn(17, 31)
    tensors = {**model.state_dict(), "lm_head.weight": head}
    for said in (config.to_dict(), {"model_type": "t5", "tie_word_embeddings": False}):
        layout = family_of(said).model(said, tensors)
        sizes = transfer.Sizes(N, N, H)
        shapes = layout.shapes({key: tuple(x.shape) for key, x in tensors.items()}, sizes)
        flax = layout.to_flax(tensors, shapes)
        np.testing.assert_array_equal(flax["lm_head.kernel"], head.numpy().T)
        np.testing.assert_array_equal(layout.to_torch(flax)["lm_head.weight"], head.numpy())


def test_a_table_of_no_use_is_passed_over():
    config = T5Config(**SIZES, d_model=31)
    tensors = dict(T5Model(config).state_dict())
    tensors["decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"] = torch.ones(
        8, N
    )
    layout = family_of(config.to_dict()).model(config.to_dict(), tensors)
    shapes = {key: tuple(x.shape) for key, x in tensors.items()}
    tables = [p for p in layout.shapes(shapes, transfer.Sizes(N, N, H)) if "position_bias" in p]
    assert tables == [
        f"{side}.layers.0.attention.position_bias.embedding" for side in ("encoder", "decoder")
    ]


@pytest.mark.parametrize("place", [ENCODER, DECODER, LATER])
def test_the_model_masks_and_biases_its_blocks_so(place):
    config = T5Config(**SIZES, d_model=31)
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(config)
    rows = {"decoder_input_ids": "tokens", "decoder_attention_mask": "real"}
    seen = mistakes.given_to(model, place, **rows)
    traits = family_of(config.to_dict()).traits(config.to_dict(), place)
    mistakes.assert_visible(seen["mask"], traits)
    # A later block is lent what the first one's table gives.
    assert (seen["position_bias"] is not None) == (place == LATER) == (traits.bias is None)
    assert traits.lender == (DECODER if place == LATER else "")
    if place == LATER:
        first = family_of(config.to_dict()).traits(config.to_dict(), DECODER)
        port = rebuild.flax_module(first, "float32")
        state = model.get_submodule(DECODER).state_dict()
        transfer.load(port, state, family_of(config.to_dict()).block(config.to_dict()))
        np.testing.assert_array_equal(port.position_bias(T, T), seen["position_bias"][0])


def relative(**fields):
    how = {"buckets": 8, "max_distance": 11, "bidirectional": True}
    return mistakes.otherwise(bias=BiasTraits("relative", how | fields))


def unbiased(block):
    """The mistake of a module without its table."""
    port = nnx.clone(block.port)
    port.position_bias = None
    return replace(block, port=port)


MISTAKES = {
    "query and key swapped": mistakes.swapped("q_proj", "k_proj"),
    "a square weight transposed": mistakes.but(row("o.weight", "out_proj.kernel", heads_in)),
    "with a scale": mistakes.otherwise(scale=None),
    "buckets of a decoder": relative(bidirectional=False),
    "buckets up to another distance": relative(max_distance=20),
    "without its bias": unbiased,
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_seen(mistake):
    mistakes.assert_seen(MISTAKES[mistake], block("square"))
