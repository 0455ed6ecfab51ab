"""T5, mT5 and UMT5 as they are published: their configs, and what is refused of others."""

import jax
import pytest
import transformers as tf
from flax import nnx

from jax_attn import models, transfer
from jax_attn.families import model_family

SMALL = {
    "d_ff": 2048,
    "d_kv": 64,
    "d_model": 512,
    "decoder_start_token_id": 0,
    "dropout_rate": 0.1,
    "eos_token_id": 1,
    "initializer_factor": 1.0,
    "is_encoder_decoder": True,
    "layer_norm_epsilon": 1e-06,
    "model_type": "t5",
    "num_heads": 8,
    "num_layers": 6,
    "pad_token_id": 0,
    "relative_attention_num_buckets": 32,
    "vocab_size": 32128,
}
LATER = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
OF_BOTH = {"dense_act_fn": "gelu_new", "is_gated_act": True, "relative_attention_max_distance": 128}
TASKS = {"summarization": {"early_stopping": True, "prefix": "summarize: "}}

# name -> (config.json, its layers, those of its decoder, the parameters in all)
PUBLISHED = {
    "google-t5/t5-small": (
        SMALL
        | {"architectures": ["T5ForConditionalGeneration"], "n_positions": 512}
        | {"output_past": True, "task_specific_params": TASKS},
        *(6, 6, 60_506_624),
    ),
    "google/flan-t5-base": (
        SMALL
        | LATER
        | {"architectures": ["T5ForConditionalGeneration"], "d_model": 768, "num_heads": 12}
        | {"num_layers": 12, "num_decoder_layers": 12, "n_positions": 512, "output_past": True}
        | {"relative_attention_max_distance": 128, "task_specific_params": TASKS}
        | {"transformers_version": "4.23.1", "use_cache": True},
        *(12, 12, 247_577_856),
    ),
    "google/mt5-small": (
        SMALL
        | LATER
        | {"architectures": ["MT5ForConditionalGeneration"], "model_type": "mt5", "d_ff": 1024}
        | {"num_heads": 6, "num_layers": 8, "num_decoder_layers": 8, "vocab_size": 250112}
        | {"tokenizer_class": "T5Tokenizer", "transformers_version": "4.10.0.dev0"},
        *(8, 8, 300_176_768),
    ),
    "google/umt5-small": (
        SMALL
        | LATER
        | OF_BOTH
        | {"architectures": ["UMT5ForConditionalGeneration"], "model_type": "umt5", "d_ff": 1024}
        | {"num_heads": 6, "num_layers": 8, "num_decoder_layers": 8, "vocab_size": 256384}
        | {"output_past": True, "scalable_attention": True, "tokenizer_class": "T5Tokenizer"},
        *(8, 8, 306_601_984),
    ),
    "the encoder of T5 1.1, XXL": (
        SMALL
        | LATER
        | OF_BOTH
        | {"architectures": ["T5EncoderModel"], "d_ff": 10240, "d_model": 4096, "num_heads": 64}
        | {"num_layers": 24, "num_decoder_layers": 24, "classifier_dropout": 0.0},
        *(24, 0, 4_762_310_656),
    ),
    "an encoder that says so": (
        SMALL | {"architectures": ["T5EncoderModel"], "is_encoder_decoder": False},
        *(6, 0, 35_330_816),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_layers_and_parameters(name):
    config, layers, of_decoder, count = PUBLISHED[name]
    traits = model_family(config).model_traits(config)
    assert (len(traits.blocks), len(traits.decoder)) == (layers, of_decoder)
    model = nnx.eval_shape(lambda: models.from_config(config, rngs=nnx.Rngs(0)))
    assert sum(x.size for x in jax.tree.leaves(nnx.state(model))) == count
    assert (model.generation.start, model.generation.ends) == (0, (1,))


# name -> fields, whether the file has lm_head.weight, and the head: is it tied, does it scale
BY_5 = {"tie_word_embeddings": True}  # as transformers 5 writes it for every T5
HEADS = {
    "t5-small": ({}, False, True, True),
    "Flan's file": ({"tie_word_embeddings": False}, True, False, False),
    "Flan, written again": (BY_5 | {"scale_decoder_outputs": False}, True, False, False),
    "made untied": (BY_5 | {"scale_decoder_outputs": False}, False, True, False),
    "t5-small, written again": (BY_5 | {"scale_decoder_outputs": True}, False, True, True),
    "a tied weight that is there twice": (BY_5, True, True, True),
    "mT5": (BY_5 | {"model_type": "mt5"}, False, True, False),
}


@pytest.mark.parametrize("name", HEADS)
def test_config_and_file_say_whether_the_head_is_tied_and_reads_scaled_states(name):
    fields, has_own, is_tied, scales = HEADS[name]
    config = SMALL | fields
    family, keys = model_family(config), ["lm_head.weight"] * has_own
    head = family.model_traits(family.settled(config, keys)).lm_head
    assert (head.is_tied, head.scale) == (is_tied, 512**-0.5 if scales else None)


TINY = {"vocab_size": 37, "d_model": 12, "d_kv": 5, "d_ff": 14, "num_layers": 1, "num_heads": 2}
MADE = {
    "t5": tf.T5Config(**TINY),
    "t5, gated": tf.T5Config(**TINY, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    "mt5": tf.MT5Config(**TINY),
    "umt5": tf.UMT5Config(**TINY),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MADE)
def test_an_untrained_model_is_written_under_the_names_of_transformers(name, tmp_path):
    """And is what transformers makes of the same config: its head is tied."""
    config = MADE[name]
    made = tf.AutoModelForSeq2SeqLM.from_config(config)
    made.save_pretrained(tmp_path / "theirs")
    models.save(models.from_config(config, rngs=nnx.Rngs(0)), tmp_path / "ours")
    ours, theirs = (transfer.load_checkpoint(tmp_path / side) for side in ("ours", "theirs"))
    with ours, theirs:
        assert {*ours} == {*theirs}
        assert {key: ours[key].shape for key in ours} == {k: theirs[k].shape for k in theirs}
    models.load(tmp_path / "theirs")


# what is asked for -> the fields that are refused, all of them at once
REFUSED = {
    "another class": ({"architectures": ["T5ForTokenClassification"]}, {"architectures"}),
    "one side": ({"is_encoder_decoder": False}, {"is_encoder_decoder"}),
    "an unknown activation": ({"feed_forward_proj": "gated-swishy"}, {"feed_forward_proj"}),
    "no name of an activation": ({"feed_forward_proj": "a-b-c"}, {"feed_forward_proj"}),
    "several": (
        {
            "feed_forward_proj": "gated-gelu",
            "dense_act_fn": "relu",
            "is_gated_act": False,
            "layer_norm_epsilon": 0,
            "num_decoder_layers": "six",
            "unheard_of": 3,
            "add_cross_attention": True,
        },
        {
            *("dense_act_fn", "is_gated_act", "layer_norm_epsilon", "num_decoder_layers"),
            "add_cross_attention",
        },
    ),
    "a field of no T5": ({"unheard_of": 3, "sliding_window": 7}, {"unheard_of", "sliding_window"}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_model_here_does_is_refused_by_name(name):
    fields, wanted = REFUSED[name]
    config = SMALL | fields
    with pytest.raises(transfer.TransferError) as caught:
        model_family(config).model_traits(config)
    found = {problem.name.removeprefix("config.json ") for problem in caught.value.problems}
    assert wanted <= found
    assert found <= {*fields}
