"""The torch designs: what they take, what they give back, and where they left the publication."""

import inspect

import pytest
import torch
from torch import nn

from helpers.torch_designs import EXTRA_ARGS, B, D, H, N, T, built, seeded
from torch_ref import DESIGNS, plain_mha

# ----------------------------------------------------------------- names and shapes

LINEAR = ("weight", "bias")
STATE_KEYS = {
    "weights_mha": {f"{m}.{p}" for m in ("w_q", "w_k", "w_v", "w_o") for p in LINEAR},
    "fused_mha": {f"{m}.{p}" for m in ("qkv_proj", "out_proj") for p in LINEAR},
    "masked_mha": {f"{m}.{p}" for m in ("W_Q", "W_K", "W_V", "W_O") for p in LINEAR},
    "mqa": {f"{m}.{p}" for m in ("W_Q", "W_K", "W_V", "W_O") for p in LINEAR},
    "plain_mha": {f"{m}.{p}" for m in ("query", "key", "value", "out") for p in LINEAR},
    "torch_mha": {"in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"},
    "gqa": {f"{m}_proj.{p}" for m in ("q", "k", "v", "out") for p in LINEAR},
}
CONSTRUCTOR_WORDS = {
    "weights_mha": ["d_model", "num_heads", "dropout"],
    "fused_mha": ["embed_dim", "num_heads"],
    "masked_mha": ["d_model", "num_heads"],
    "mqa": ["d_model", "num_heads"],
    "plain_mha": ["embed_dim", "num_heads"],
    "gqa": [
        *("embed_dim", "num_heads", "num_kv_heads", "head_dim", "kdim", "vdim", "bias"),
        *("out_bias", "dropout", "out_dropout", "scale", "softcap", "qk_norm", "rotary"),
        *("position_bias", "add_bias_kv", "add_zero_attn", "sinks"),
    ],
}


def test_every_design_has_a_row_here():
    assert set(STATE_KEYS) == set(DESIGNS)


@pytest.mark.parametrize("name", DESIGNS)
def test_state_dict_keys_are_the_published_ones(name):
    assert set(built(name, D, N, *EXTRA_ARGS.get(name, ())).state_dict()) == STATE_KEYS[name]


@pytest.mark.parametrize("name", CONSTRUCTOR_WORDS)
def test_constructor_words_are_the_published_ones(name):
    assert list(inspect.signature(DESIGNS[name]).parameters) == CONSTRUCTOR_WORDS[name]


def test_mqa_projects_keys_and_values_to_one_head():
    module = DESIGNS["mqa"](D, N)
    assert module.W_K.weight.shape == module.W_V.weight.shape == (H, D)


# ------------------------------------------------------------------- departures


def test_weights_mha_attention_has_its_self():
    module = built("weights_mha", D, N)

    class AsPublished(type(module)):
        def scaled_dot_product_attention(q, k, v, mask=None):
            raise AssertionError("never reached")

    with pytest.raises(TypeError, match="positional argument"):
        AsPublished(D, N)(torch.zeros(B, T, D))
    module(seeded(B, T, D))


def test_weights_mha_mask_of_another_rank_is_refused():
    with pytest.raises(ValueError, match=r"mask: expected shape \(2, 5, 5\), got \(5, 5\)"):
        built("weights_mha", D, N)(seeded(B, T, D), torch.ones(T, T))


def test_weights_mha_drops_from_the_output_only():
    module = built("weights_mha", D, N, dropout=1.0).train()
    output, weights = module(seeded(B, T, D))
    assert (output == 0).all()
    assert torch.equal(weights, module.eval()(seeded(B, T, D))[1])


def test_gqa_drops_weights_and_output_apart():
    x = seeded(B, T, D)
    module = built("gqa", D, N, 1, dropout=1.0).train()
    assert torch.equal(module(x), module.out_proj.bias.expand(B, T, D))
    assert torch.equal(module.attention_weights(x), module.eval().attention_weights(x))
    assert (built("gqa", D, N, 1, out_dropout=1.0).train()(x) == 0).all()


def test_mqa_has_what_it_reads():
    module = built("mqa", D, N)
    with pytest.raises(AttributeError, match="n_model"):
        _ = module.n_model
    with pytest.raises(AttributeError, match="view"):
        _ = seeded(B, T, D).contiguous.view
    assert module(seeded(B, T, D)).shape == (B, T, module.d_model)


def test_nothing_is_printed(capsys):
    for name in sorted(DESIGNS.keys() - {"torch_mha"}):
        built(name, D, N, *EXTRA_ARGS.get(name, ()))(seeded(B, T, D))
    assert capsys.readouterr().out == ""


# ------------------------------------------------------------ torch's own, the pipeline


def test_torch_mha_is_torchs_own():
    assert DESIGNS["torch_mha"] is nn.MultiheadAttention


SENTENCES = {
    "published": ("this is an example sentence", [1, 2, 3, 4, 5, 0, 0, 0, 0, 0]),
    "capitals, a stranger": ("This was an  Example", [1, 0, 3, 4, 0, 0, 0, 0, 0, 0]),
    "too long": ("is " * 11, [2] * 10),
    "nothing": ("", [0] * 10),
}


@pytest.mark.parametrize(("sentence", "ids"), SENTENCES.values(), ids=SENTENCES)
def test_sentences_become_ids(sentence, ids):
    encoded = plain_mha.encode_sentence(sentence, plain_mha.simple_tokenizer)
    assert encoded.dtype == torch.long
    assert encoded.tolist() == ids


def test_sentence_attention_embeds_then_attends():
    pipeline = plain_mha.SentenceAttention(6, D, N)
    ids = plain_mha.encode_sentence("an example", plain_mha.simple_tokenizer, max_len=T)[None]
    assert torch.equal(pipeline(ids), pipeline.attention(pipeline.embedding(ids)))
    assert {key.split(".")[0] for key in pipeline.state_dict()} == {"embedding", "attention"}
