"""BERT, RoBERTa, Electra: transformers' own blocks and files against ours, through the tables."""

from functools import cache

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertModel, ElectraConfig, RobertaConfig
from transformers.models.bert.modeling_bert import BertAttention
from transformers.models.electra.modeling_electra import ElectraAttention
from transformers.models.roberta.modeling_roberta import RobertaAttention

from helpers.dtype_rows import in_dtypes
from helpers.families.family_cases import BlockPair, added, scattered
from helpers.families.family_mistakes import assert_seen, but, otherwise, swapped
from helpers.same_arrays import assert_same
from jax_attn import parity, transfer
from jax_attn.attention import Mask
from jax_attn.families.bert import BERT
from jax_attn.parity.checking.weights import Weights, compare_weights
from jax_attn.porting.verify import rebuild
from jax_attn.transfer import Sizes, TransferError, heads, row

SIZES = {"hidden_size": 30, "num_attention_heads": 6, "attn_implementation": "eager"}
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


@cache
def block(name, dtype="float32"):
    config, kind = CASES[name]
    torch.manual_seed(0)
    reference = WithoutNorm(kind(config, is_causal=config.is_decoder, layer_idx=1))
    return BlockPair.of(reference, config, PLACE, theirs, dtype)


@pytest.mark.slow
@in_dtypes("name", CASES)
def test_a_block_agrees_with_transformers(name, dtype):
    block(name, dtype).check().raise_for_status()


@pytest.mark.slow
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
    parity.check(
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
    ).raise_for_status()


OF_WEIGHTS = {
    "query and key swapped": swapped("q_proj", "k_proj"),
    "a square weight not transposed": but(row("self.query.weight", "q_proj.kernel", heads)),
}
OF_TRAITS = {
    "causal": otherwise(is_causal=True),
    "scale of another head_dim": otherwise(scale=11**-0.5),
}


@pytest.mark.parametrize("mistake", OF_WEIGHTS | OF_TRAITS)
def test_a_mistake_is_seen(mistake):
    """In the outputs, and in the weights where they are what is wrong."""
    mistaken, right = (OF_WEIGHTS | OF_TRAITS)[mistake], block("bert")
    assert_seen(mistaken, right)
    weights = compare_weights(Weights.of(right.reference), mistaken(right).port, right.layout)
    assert bool(weights.differences) == (mistake in OF_WEIGHTS)


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


def test_distances_in_the_scores_are_refused_by_name():
    layout = BERT.block({"model_type": "bert"})
    with pytest.raises(TransferError, match="relative position embeddings are not supported"):
        layout.shapes({"self.distance_embedding.weight": (45, 10)}, Sizes(3, 3, 10))


@pytest.mark.parametrize(
    ("kind", "D", "N"), [("bert", 768, 12), ("roberta", 768, 12), ("electra", 256, 4)]
)
def test_what_a_config_leaves_out_is_transformers_default(kind, D, N):
    traits = BERT.traits({"model_type": kind}, PLACE)
    assert (traits.embed_dim, traits.sizes) == (D, Sizes(N, N, D // N))
