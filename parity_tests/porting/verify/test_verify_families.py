"""`jax-attn verify` of families' checkpoints: what their configs say is in the rebuild.

The files are transformers' own, of models made at random. The rebuild itself is held against
transformers in the families' own tests; here the torch side reads the file's rows by no table.
"""

import json

import pytest
import torch
import transformers as hf
from transformers.utils import logging

from helpers.families.family_cases import scattered
from helpers.transfer.torch_checkpoints import INCONCLUSIVE, PASS, USAGE, document, run
from jax_attn.families import FAMILIES
from jax_attn.parity.checking.weights import Weights, compare_weights
from jax_attn.porting.verify import family_spellings
from jax_attn.porting.verify import layer as rebuilding
from jax_attn.porting.verify.layer import flax_side, read_layer, torch_side, verify_layer
from jax_attn.porting.verify.survey import survey
from jax_attn.transfer import LAYOUTS, load_checkpoint
from jax_attn.transfer.files.port_folder import read_config

logging.disable_progress_bar()
pytestmark = pytest.mark.usefixtures("compiled_alone")

SMALL = {"num_hidden_layers": 1, "vocab_size": 17, "intermediate_size": 22}
GROUPED = {"hidden_size": 36, "num_attention_heads": 6, "num_key_value_heads": 3} | SMALL
ONE = {"hidden_size": 36, "num_attention_heads": 6} | SMALL
OPT = ONE | {"ffn_dim": 22, "word_embed_proj_dim": 36}
GPT = {"n_embd": 30, "n_head": 6, "n_layer": 1, "vocab_size": 17}

# name -> (model, what the rebuild of its last block has besides attending, N×K×H, whether that runs
# without --long)
CASES = {
    "bert": (lambda: hf.BertModel(hf.BertConfig(**ONE)), "", "6x6x6", False),
    "vit": (
        lambda: hf.ViTModel(hf.ViTConfig(**ONE, image_size=8, patch_size=4)),
        "",
        "6x6x6",
        False,
    ),
    "gpt2": (lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**GPT)), "", "6x6x5", False),
    "gpt_bigcode": (
        lambda: hf.GPTBigCodeModel(hf.GPTBigCodeConfig(**GPT, multi_query=False)),
        "",
        "6x6x5",
        False,
    ),
    "falcon": (
        lambda: hf.FalconModel(
            hf.FalconConfig(
                hidden_size=36,
                num_attention_heads=6,
                num_kv_heads=3,
                new_decoder_architecture=True,
                num_hidden_layers=1,
                vocab_size=17,
            )
        ),
        "rotary",
        "6x3x6",
        True,
    ),
    "gpt_neox": (
        lambda: hf.GPTNeoXModel(hf.GPTNeoXConfig(**(ONE | {"hidden_size": 48}), rotary_pct=0.5)),
        "rotary",
        "6x6x8",
        False,
    ),
    "bloom": (
        lambda: hf.BloomModel(hf.BloomConfig(hidden_size=30, n_head=6, n_layer=1, vocab_size=17)),
        "ALiBi",
        "6x6x5",
        True,
    ),
    "t5, a block that borrows its bias": (
        lambda: hf.T5EncoderModel(
            hf.T5Config(d_model=30, d_kv=7, num_heads=6, num_layers=2, vocab_size=17, d_ff=22)
        ),
        "its own scale, relative bias",
        "6x6x7",
        True,
    ),
    "t5, the decoder": (
        lambda: hf.T5ForConditionalGeneration(
            hf.T5Config(d_model=30, d_kv=7, num_heads=6, num_layers=1, vocab_size=17, d_ff=22)
        ),
        "its own scale",
        "6x6x7",
        False,
    ),
    "mistral": (
        lambda: hf.MistralModel(hf.MistralConfig(**GROUPED, sliding_window=5)),
        "rotary, window",
        "6x3x6",
        False,
    ),
    "qwen3": (
        lambda: hf.Qwen3Model(hf.Qwen3Config(**GROUPED, head_dim=10)),
        "rotary, QK-norm",
        "6x3x10",
        True,
    ),
    "opt": (lambda: hf.OPTModel(hf.OPTConfig(**OPT)), "", "6x6x6", False),
    "phi": (
        lambda: hf.PhiModel(
            hf.PhiConfig(**(ONE | {"hidden_size": 48}), qk_layernorm=True, num_key_value_heads=3)
        ),
        "rotary, QK-norm",
        "6x3x8",
        False,
    ),
    "gemma2": (
        lambda: hf.Gemma2ForCausalLM(
            hf.Gemma2Config(**GROUPED, head_dim=10, sliding_window=5, query_pre_attn_scalar=7)
        ),
        "rotary, softcap, window, its own scale",
        "6x3x10",
        False,
    ),
    "gemma3": (
        lambda: hf.Gemma3ForCausalLM(
            hf.Gemma3TextConfig(**GROUPED, head_dim=10, sliding_window=5, query_pre_attn_scalar=7)
        ),
        "rotary, QK-norm, window, its own scale",
        "6x3x10",
        False,
    ),
}


def other_weights(layer, checkpoint):
    """Those that the two sides read otherwise."""
    arrays = read_layer(layer, checkpoint)
    sides = torch_side(layer, arrays), flax_side(layer, arrays)
    return compare_weights(Weights.of(sides[0]), sides[1], LAYOUTS["gqa"]).differences


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_layer_is_read_and_the_last_rebuilt_as_its_config_says(name, tmp_path, request):
    make, variant, shape, always = CASES[name]
    scattered(make()).save_pretrained(tmp_path)
    with load_checkpoint(tmp_path) as checkpoint:
        found = survey(checkpoint, read_config(tmp_path))
        for layer in found:
            assert other_weights(layer, checkpoint) == ()
        last = found[-1]
        assert rebuilding.variant(last.traits) == variant
        assert "x".join(map(str, last.traits.sizes)) == shape
        if always or request.config.getoption("--long"):
            verify_layer(last, checkpoint).raise_for_status()


def test_every_family_has_the_names_of_its_projections():
    assert family_spellings.SPELLED.keys() == FAMILIES.keys()


@pytest.mark.slow
def test_in_bfloat16_a_key_bias_is_seen(tmp_path):
    """By rotary alone, which parts the keys: no softmax sees what they share."""
    model = scattered(hf.Qwen2Model(hf.Qwen2Config(**GROUPED)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter /= 6  # of 36 features: scores of about 1, as wide ones leave no power
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    (case,) = document(tmp_path, status=PASS)["cases"]
    assert (case["dtype"], case["variant"]) == ("bfloat16", "rotary")


def doubts_of(tmp_path, config, model):
    """Why a file that its config does not describe is not verified."""
    scattered(model).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = document(tmp_path, status=INCONCLUSIVE)["cases"]
    findings = [finding for case in found for finding in case["findings"]]
    return [(f["kind"], f["sentence"]) for f in findings if f["weight"] == "doubt"]


@pytest.mark.slow
def test_blocks_of_another_family_do_not_pass_for_this_ones(tmp_path):
    config = {"model_type": "bert", "num_attention_heads": 6, "hidden_size": 36}
    ((kind, doubt),) = doubts_of(tmp_path, config, hf.LlamaModel(hf.LlamaConfig(**GROUPED)))
    assert kind == "not-rebuilt"
    assert doubt.startswith("family bert: ")


@pytest.mark.slow
def test_a_part_does_not_pass_for_the_whole(tmp_path):
    config = hf.BertConfig(**(ONE | {"num_hidden_layers": 2})).to_dict()
    ((kind, doubt),) = doubts_of(tmp_path, config, hf.BertModel(hf.BertConfig(**ONE)))
    assert kind == "not-rebuilt"
    assert "in 2 layers" in doubt
    assert doubt.endswith(" in [1]")


def test_heads_that_cannot_turn_are_wrong_input(tmp_path):
    model = hf.LlamaModel(hf.LlamaConfig(**GROUPED, head_dim=8))
    scattered(model).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(model.config.to_dict() | {"head_dim": 7}))
    done = run(tmp_path)
    assert (done.exit_code, type(done.exception)) == (USAGE, SystemExit)
    assert "expected an even head_dim" in done.stderr


def test_the_torch_side_reads_no_table(tmp_path, monkeypatch):
    """So that a table that packs otherwise is seen."""
    make, *_ = CASES["falcon"]
    scattered(make()).save_pretrained(tmp_path)
    (spelled,) = family_spellings.SPELLED["falcon"]
    monkeypatch.setitem(family_spellings.SPELLED, "falcon", (spelled._replace(by_group=False),))
    with load_checkpoint(tmp_path) as checkpoint:
        (layer,) = survey(checkpoint, read_config(tmp_path))
        assert any("q_proj.weight" in failure for failure in other_weights(layer, checkpoint))
