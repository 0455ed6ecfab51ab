"""Published models, built at random from their configs, against a transformer of our own names."""

import re

import pytest
import torch
import transformers
from flax import nnx
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXAttention
from transformers.models.phi.modeling_phi import PhiAttention

from helpers.transfer.renamed_models import LAYERS, SIZES, D, N, abstract
from jax_attn import MultiHeadAttention, Rotary
from jax_attn.transfer import flatten, infer

VOCABULARY, POSITIONS, HIDDEN, _ = SIZES["as published"]


def gpt2():
    sizes = {"n_embd": D, "n_head": N, "n_layer": LAYERS, "n_inner": HIDDEN}
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=POSITIONS, bos_token_id=0, eos_token_id=0, **sizes
    )
    return transformers.GPT2LMHeadModel(config)


def bert():
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=POSITIONS,
        hidden_size=D,
        num_attention_heads=N,
        num_hidden_layers=LAYERS,
        intermediate_size=HIDDEN,
    )
    return transformers.BertModel(config)


GPT2 = {
    "transformer.wte.weight -> tokens.embedding [=]",
    "transformer.wpe.weight -> positions.embedding [=]",
    "transformer.h.1.ln_1.weight -> layers.1.norm1.scale [=]",
    "transformer.h.1.ln_2.bias -> layers.1.norm2.bias [=]",
    "transformer.h.1.attn.c_proj.weight -> layers.1.attn.out.kernel [heads_in]",  # a Conv1D
    "transformer.h.1.mlp.c_fc.weight -> layers.1.mlp.up.kernel [=]",
    "transformer.h.1.mlp.c_proj.weight -> layers.1.mlp.down.kernel [=]",
    "transformer.ln_f.weight -> final_norm.scale [=]",
}
BERT = {
    "embeddings.word_embeddings.weight -> tokens.embedding [=]",
    "embeddings.position_embeddings.weight -> positions.embedding [=]",
    "encoder.layer.1.attention.self.query.weight -> layers.1.attn.query.kernel [linear heads]",
    "encoder.layer.1.attention.output.dense.weight -> layers.1.attn.out.kernel [linear heads_in]",
    "encoder.layer.1.intermediate.dense.weight -> layers.1.mlp.up.kernel [linear]",
}
# Every other key; those that have no such name, as a norm before or behind, do not slip through.
OPEN = {
    "gpt2": {f"transformer.h.{{layer}}.attn.c_attn.{leaf}" for leaf in ("weight", "bias")},
    "bert": {
        "embeddings.token_type_embeddings.weight",
        *(
            f"{module}.{leaf}"
            for module in (
                "embeddings.LayerNorm",
                "encoder.layer.{layer}.attention.output.LayerNorm",
                "encoder.layer.{layer}.output.dense",
                "encoder.layer.{layer}.output.LayerNorm",
                "pooler.dense",
            )
            for leaf in ("weight", "bias")
        ),
    },
}


@pytest.mark.parametrize(("name", "build", "rows"), [("gpt2", gpt2, GPT2), ("bert", bert, BERT)])
def test_what_is_decided_and_what_is_open(name, build, rows):
    torch.manual_seed(0)
    proposal = infer(build(), abstract(sizes="as published"))
    assert {proposal.layout.row_of(line.split(" -> ")[0]) for line in rows} == rows
    assert {question.key for question in proposal.undecided} == OPEN[name]


def test_both_readings_of_a_packed_projection_are_offered():
    """Of a Conv1D, one after another or head by head."""
    weight, bias = infer(gpt2(), abstract(sizes="as published")).undecided
    steps = [[step.name for step in c.row.steps] for c in (*weight.candidates, *bias.candidates)]
    assert steps == [
        ["linear", "packed", "linear", "heads"],
        ["linear", "grouped", "inward"],
        ["packed", "heads"],
        ["grouped"],
    ]
    assert weight.why == "packed query, key, value; shapes do not determine their order"


ATTENTION = {
    "Phi": (PhiAttention, transformers.PhiConfig, set()),
    "GPT-NeoX": (
        GPTNeoXAttention,
        transformers.GPTNeoXConfig,
        {"query_key_value.weight", "query_key_value.bias"},
    ),
}


@pytest.mark.parametrize("name", ATTENTION)
def test_of_attention_alone_dense_is_the_output_and_only_what_is_there_is_spoken_of(name):
    cls, config, packed = ATTENTION[name]
    torch.manual_seed(0)
    module = cls(config(hidden_size=D, num_attention_heads=N), 0)
    port = nnx.eval_shape(lambda: MultiHeadAttention(D, N, rotary=Rotary(dim=4), rngs=nnx.Rngs(0)))
    proposal = infer(module, port)
    assert {question.key for question in proposal.undecided} == packed
    assert proposal.layout.row_of("dense.weight") == (
        "dense.weight -> out_proj.kernel [linear heads_in]"
    )
    assert proposal.layout.row_of("dense.bias") == "dense.bias -> out_proj.bias [=]"
    there = {*module.state_dict(), *flatten(port), "q_proj", "k_proj"}
    assert {*re.findall(r'"([^"]+)"', proposal.code)} <= there
