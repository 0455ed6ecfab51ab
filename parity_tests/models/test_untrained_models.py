"""Models of a config alone: their heads, and files of them that transformers reads whole."""

import numpy as np
import pytest
import transformers as tf
from flax import nnx

from helpers.families.whole_models import BLOOM, GEMMA2, GPT2, GROUPED, IDS, OPT, PLAIN
from jax_attn import models

# transformers' class -> what its config says
CLASSES = {
    "LlamaForQuestionAnswering": GROUPED,
    "Qwen2ForQuestionAnswering": PLAIN | {"num_key_value_heads": 2},
    "Qwen3ForQuestionAnswering": GROUPED,
    "MistralForQuestionAnswering": GROUPED,
    "LlamaForCausalLM": GROUPED,
    "OPTForQuestionAnswering": OPT,
    "RobertaForMaskedLM": PLAIN,
    "XLMRobertaForSequenceClassification": PLAIN,
    "CamembertForQuestionAnswering": PLAIN,
    "BertForTokenClassification": PLAIN,
    "BertForMultipleChoice": PLAIN,
    "RobertaForTokenClassification": PLAIN,
    "RobertaForMultipleChoice": PLAIN,
    "BloomForTokenClassification": BLOOM,
    "FalconForTokenClassification": PLAIN,
    "GPT2ForTokenClassification": GPT2,
    "GPTBigCodeForTokenClassification": GPT2,
    "GPTNeoXForTokenClassification": PLAIN,
    "PhiForTokenClassification": PLAIN,
    "Qwen3ForTokenClassification": GROUPED,
    "LlamaForTokenClassification": GROUPED | {"token_classification_bias": False},
    "Gemma2ForTokenClassification": GEMMA2,
    "GPT2Model": GPT2,
    "XLMRobertaModel": PLAIN,
}
DECODERS = ("BertModel", "BertForSequenceClassification", "BertForNextSentencePrediction")


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CLASSES, *DECODERS])
def test_transformers_reads_what_an_untrained_model_is_saved_as(name, tmp_path):
    """No key is missing and none is unexpected. DECODERS: of BERT, each with its pooler."""
    kind = getattr(tf, name)
    says = CLASSES.get(name, PLAIN | {"is_decoder": True})
    labels = 2 if name.endswith("ForQuestionAnswering") else 3
    config = kind.config_class(**(IDS | says), architectures=[name], num_labels=labels)
    model = models.from_config(config, rngs=nnx.Rngs(0))
    models.save(model, tmp_path / "saved")
    _, loading = kind.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert {what: keys for what, keys in loading.items() if keys} == {}


@pytest.mark.slow
def test_a_decoder_with_a_pooler_classifies_rows():
    config = tf.BertConfig(**PLAIN, is_decoder=True, num_labels=3)
    config.architectures = ["BertForSequenceClassification"]
    model = models.from_config(config, rngs=nnx.Rngs(0))
    assert model(np.ones((2, 5), int)).logits.shape == (2, 3)


@pytest.mark.slow
def test_numpys_numbers_are_numbers_of_a_config():
    says = {name: np.int64(value) for name, value in PLAIN.items()}
    config = {"model_type": "bert", "layer_norm_eps": np.float32(0.5)} | says
    model = models.from_config(config, rngs=nnx.Rngs(0))
    assert model.embed_dim == PLAIN["hidden_size"]
    assert model.embedding.norm.epsilon == 0.5


@pytest.mark.slow
def test_falcons_old_name_of_its_width():
    config = {"model_type": "falcon", **PLAIN, "n_embed": PLAIN["hidden_size"]}
    del config["hidden_size"]
    assert models.from_config(config, rngs=nnx.Rngs(0)).embed_dim == PLAIN["hidden_size"]
