"""BERT, RoBERTa, Electra: transformers' own blocks and files against ours, through the tables."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from dtype_rows import rows
from family_cases import Block, added, assert_same, roundtrip, scattered
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    BertForQuestionAnswering,
    BertLMHeadModel,
    BertModel,
    CamembertConfig,
    CamembertForMaskedLM,
    ElectraConfig,
    ElectraForMaskedLM,
    ElectraForPreTraining,
    ElectraForSequenceClassification,
    RobertaConfig,
    RobertaForMaskedLM,
    RobertaForSequenceClassification,
    XLMRobertaConfig,
    XLMRobertaForTokenClassification,
)
from transformers.models.bert.modeling_bert import BertAttention
from transformers.models.electra.modeling_electra import ElectraAttention
from transformers.models.roberta.modeling_roberta import RobertaAttention

from jax_attn import parity, transfer
from jax_attn.attention import Mask
from jax_attn.parity import rebuild
from jax_attn.parity.compare import Verdict
from jax_attn.parity.verdict import compare_weights
from jax_attn.transfer import FROM_HEADS, TO_HEADS, Layout, Sizes, TransferError, heads, row
from jax_attn.transfer.families.bert import BERT

SIZES = {"hidden_size": 30, "num_attention_heads": 3, "attn_implementation": "eager"}
WHOLE = SIZES | {
    "num_hidden_layers": 2,
    "intermediate_size": 37,
    "vocab_size": 41,
    "max_position_embeddings": 23,
}
PLACE = "encoder.layer.1.attention"


class WithoutNorm(torch.nn.Module):
    """transformers' attention up to where the residual is added: what a block's table carries."""

    def __init__(self, attention):
        super().__init__()
        self.self = attention.self
        self.output = torch.nn.ModuleDict({"dense": attention.output.dense})


def theirs(module, x, mask, **options):
    return module.output["dense"](module.self(x, attention_mask=mask, **options)[0])


# name -> (config, transformers' attention)
CASES = {
    "bert": (BertConfig(**SIZES), BertAttention),
    "bert as a decoder": (BertConfig(**SIZES, is_decoder=True), BertAttention),
    "roberta": (RobertaConfig(**SIZES), RobertaAttention),
    "electra": (ElectraConfig(**SIZES, embedding_size=17), ElectraAttention),
}


def pytest_generate_tests(metafunc):
    rows(metafunc, "test_a_block_agrees_with_transformers", ["name"], CASES)
    rows(metafunc, "test_a_file_goes_there_and_back", ["name"], MODELS, low=("bert",))


def block(name, dtype="float32"):
    config, kind = CASES[name]
    torch.manual_seed(0)
    reference = WithoutNorm(kind(config, is_causal=config.is_decoder, layer_idx=1))
    return Block.of(reference, config, PLACE, theirs, dtype)


def test_a_block_agrees_with_transformers(name, dtype):
    result = block(name, dtype).check()
    assert result.verdict is Verdict.PASS, str(result)


def test_cross_attention_agrees_with_transformers():
    """Keys and values come from a longer, padded sequence."""
    config = BertConfig(**SIZES, is_decoder=True, add_cross_attention=True)
    torch.manual_seed(0)
    reference = WithoutNorm(BertAttention(config, is_cross_attention=True)).eval()
    family, place = BERT, "encoder.layer.1.crossattention"
    traits = family.traits(config.to_dict(), place)
    assert (traits.cross, traits.is_causal) == (True, False)
    layout, port = family.block(config.to_dict()), rebuild.flax_module(traits, "float32")
    transfer.load(port, reference.state_dict(), layout)
    rng = np.random.default_rng(0)
    result = parity.check(
        reference,
        port,
        {
            "x": rng.standard_normal((2, 5, 30)),
            "memory": rng.standard_normal((2, 11, 30)),
            "lengths": np.array([11, 8], np.int32),
        },
        layout=layout,
        reference_call=lambda module, x, memory, lengths: theirs(
            module,
            x,
            added(torch.arange(11) < lengths[:, None, None, None], x.dtype),
            encoder_hidden_states=memory,
        ),
        port_call=lambda module, x, memory, lengths: module(x, memory, mask=Mask.lengths(lengths)),
        transforms=("jit",),
    )
    assert result.verdict is Verdict.PASS, str(result)


def swapped(r):
    """q_proj's weights where k_proj's belong, and the reverse."""
    names = {"self.query": "self.key", "self.key": "self.query"}
    return Layout(*(TO_HEADS.under(names.get(k, k), p) for k, p in QKV), r)


QKV = (("self.query", "q_proj"), ("self.key", "k_proj"), ("self.value", "v_proj"))
OUT = FROM_HEADS.under("output.dense", "out_proj")
UNTURNED = Layout(row("weight", "kernel", heads), row("bias", "bias", heads))

# name -> (table to load by, traits to call by)
PLANTED = {
    "nothing": lambda layout, traits: (layout, traits),
    "query and key swapped": lambda layout, traits: (swapped(OUT), traits),
    "a square weight not transposed": lambda layout, traits: (
        Layout(UNTURNED.under("self.query", "q_proj"), *(TO_HEADS.under(*n) for n in QKV[1:]), OUT),
        traits,
    ),
    "causal": lambda layout, traits: (layout, replace(traits, is_causal=True)),
    "scale of another head_dim": lambda layout, traits: (layout, replace(traits, scale=11**-0.5)),
}


def test_a_planted_mistake_fails():
    right = block("bert")
    prepared, found, weights = right.prepared(), {}, {}
    for name, plant in PLANTED.items():
        layout, traits = plant(right.layout, right.traits)
        port = rebuild.flax_module(traits, "float32")
        transfer.load(port, right.reference.state_dict(), layout)
        found[name] = replace(right, traits=traits).judge(prepared, port).verdict
        weights[name] = not compare_weights(right.reference, port, right.layout)
    passing = {"nothing"}
    assert {n for n, verdict in found.items() if verdict is not Verdict.FAIL} == passing
    assert {n for n, same in weights.items() if not same} == {
        "query and key swapped",
        "a square weight not transposed",
    }


# name -> (model, what is passed over in its state_dict)
TIED = {"decoder.weight", "decoder.bias"}
MODELS = {
    "bert": (lambda: BertModel(BertConfig(**WHOLE)), set()),
    "bert with both heads": (lambda: BertForPreTraining(BertConfig(**WHOLE)), TIED),
    "bert, untied": (
        lambda: BertForMaskedLM(BertConfig(**WHOLE, tie_word_embeddings=False)),
        {"predictions.bias"},
    ),
    "bert with answers": (lambda: BertForQuestionAnswering(BertConfig(**WHOLE)), set()),
    "bert as a decoder across": (
        lambda: BertLMHeadModel(BertConfig(**WHOLE, is_decoder=True, add_cross_attention=True)),
        TIED,
    ),
    "roberta": (lambda: RobertaForMaskedLM(RobertaConfig(**WHOLE)), TIED),
    "roberta with classes": (
        lambda: RobertaForSequenceClassification(RobertaConfig(**WHOLE, num_labels=5)),
        set(),
    ),
    "xlm-roberta with classes": (
        lambda: XLMRobertaForTokenClassification(XLMRobertaConfig(**WHOLE, num_labels=5)),
        set(),
    ),
    "camembert": (lambda: CamembertForMaskedLM(CamembertConfig(**WHOLE)), TIED),
    "electra's generator": (
        lambda: ElectraForMaskedLM(ElectraConfig(**WHOLE, embedding_size=17)),
        {"generator_lm_head.weight"},
    ),
    "electra, untied": (
        lambda: ElectraForMaskedLM(
            ElectraConfig(**WHOLE, embedding_size=17, tie_word_embeddings=False)
        ),
        set(),
    ),
    "electra's discriminator": (
        lambda: ElectraForPreTraining(ElectraConfig(**WHOLE, embedding_size=30)),
        set(),
    ),
    "electra with classes": (
        lambda: ElectraForSequenceClassification(ElectraConfig(**WHOLE, embedding_size=17)),
        set(),
    ),
}


def test_a_file_goes_there_and_back(name, dtype, tmp_path):
    build, expected = MODELS[name]
    torch.manual_seed(0)
    passed = roundtrip(scattered(build()).to(getattr(torch, dtype)), tmp_path)
    assert {next((e for e in expected if key.endswith(e)), key) for key in passed} == expected


def shapes_of(tensors):
    return {key: tensor.shape for key, tensor in tensors.items()}


def test_files_of_the_first_years_are_read():
    """Norms of gamma and beta, and a buffer of positions."""
    model = scattered(BertModel(BertConfig(**WHOLE)))
    tensors = {k: transfer.as_numpy(t) for k, t in model.state_dict().items()}
    spelled = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    old = {}
    for key, tensor in tensors.items():
        for new, first in spelled.items():
            key = key.replace(new, first)
        old[key] = tensor
    old["embeddings.position_ids"] = np.arange(23)[None]
    config = model.config.to_dict()
    sizes, flax = BERT.traits(config, PLACE).sizes, []
    for given in (old, tensors):
        layout = BERT.model(config, given)
        flax.append(layout.to_flax(given, layout.shapes(shapes_of(given), sizes)))
    assert_same(*flax)
    assert any("gamma" in key for key in old)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"position_embedding_type": "relative_key"},
            "position_embedding_type': expected 'absolute', got 'rel",
        ),
        (
            {"num_attention_heads": 7},
            "num_attention_heads': expected a divisor of hidden_size = 30, got 7",
        ),
        ({"is_decoder": "yes"}, "is_decoder': expected true or false, got 'yes'"),
    ],
)
def test_a_config_without_a_place_here_is_refused(change, words):
    with pytest.raises(TransferError, match=words):
        BERT.traits(BertConfig(**SIZES).to_dict() | change, PLACE)


def test_distances_in_the_scores_are_refused_by_name():
    layout = BERT.block({"model_type": "bert"})
    with pytest.raises(TransferError, match="distances in the scores have no place here"):
        layout.shapes({"self.distance_embedding.weight": (45, 10)}, Sizes(3, 3, 10))


@pytest.mark.parametrize(
    ("kind", "D", "N"), [("bert", 768, 12), ("roberta", 768, 12), ("electra", 256, 4)]
)
def test_what_a_config_leaves_out_is_transformers_default(kind, D, N):
    traits = BERT.traits({"model_type": kind}, PLACE)
    assert (traits.embed_dim, traits.sizes) == (D, Sizes(N, N, D // N))
