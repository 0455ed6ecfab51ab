"""Whole files of every family, as they live and as transformers writes them, there and back.

Other files are in models/test_whole_models.py and test_untrained_models.py.
"""

import torch

from helpers.dtype_rows import in_dtypes
from helpers.families.family_cases import roundtrip, scattered
from helpers.families.family_models import BLOOM, GPT2, GROUPED, PLAIN, T5, VIT, tf

UNTIED, LM_HEAD = {"tie_word_embeddings": False}, "lm_head.weight"
ACROSS = PLAIN | {"is_decoder": True, "add_cross_attention": True}
ELECTRA = PLAIN | {"embedding_size": 17}
FALCON = PLAIN | {"new_decoder_architecture": True, "num_kv_heads": 3}
NUMBERED = T5 | {"num_decoder_layers": 3}
GATED = NUMBERED | {"feed_forward_proj": "gated-gelu"}
SIDES = {f"{side}.embed_tokens.weight": "shared.weight" for side in ("encoder", "decoder")}
WHOLE_T5, ENCODER = SIDES | {LM_HEAD: "shared.weight"}, dict([*SIDES.items()][:1])
INSIDE = {f"transformer.{key}": f"transformer.{same}" for key, same in SIDES.items()}
BERT_TIED = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}
ELECTRA_TIED = {"generator_lm_head.weight": "electra.embeddings.word_embeddings.weight"}
# name -> transformers' class, what its config says, the keys that are passed over, and their ties
FILES = {
    "bert as a decoder across": ("BertLMHeadModel", ACROSS, BERT_TIED),
    "electra's generator": ("ElectraForMaskedLM", ELECTRA, ELECTRA_TIED),
    "electra, untied": ("ElectraForMaskedLM", ELECTRA | UNTIED, {}),
    "electra's discriminator": ("ElectraForPreTraining", PLAIN | {"embedding_size": 24}, {}),
    "electra with classes": ("ElectraForSequenceClassification", ELECTRA, {}),
    "bloom, untied": ("BloomForCausalLM", BLOOM | UNTIED, {}),
    "falcon of groups": (
        "FalconForCausalLM",
        FALCON | {"bias": True},
        {LM_HEAD: "transformer.word_embeddings.weight"},
    ),
    "falcon, one norm": (
        "FalconForCausalLM",
        FALCON | UNTIED | {"num_ln_in_parallel_attn": 1},
        {},
    ),
    "gpt2, untied": ("GPT2LMHeadModel", GPT2 | UNTIED, {}),
    "gpt2, two heads": (
        "GPT2DoubleHeadsModel",
        GPT2 | {"num_labels": 1},
        {LM_HEAD: "transformer.wte.weight"},
    ),
    "gpt_bigcode head by head": ("GPTBigCodeModel", GPT2 | {"multi_query": False}, {}),
    "gpt_neox, tied": (
        "GPTNeoXForCausalLM",
        PLAIN | {"tie_word_embeddings": True, "rotary_pct": 0.5},
        {LM_HEAD: "gpt_neox.embed_in.weight"},
    ),
    "qwen3, tied": (
        "Qwen3ForCausalLM",
        GROUPED | {"tie_word_embeddings": True},
        {LM_HEAD: "model.embed_tokens.weight"},
    ),
    "t5": ("T5Model", NUMBERED, SIDES),
    "t5 with a head": ("T5ForConditionalGeneration", NUMBERED, WHOLE_T5),
    "t5, gated": ("T5ForConditionalGeneration", GATED, WHOLE_T5),
    "t5, an encoder alone": ("T5EncoderModel", GATED, ENCODER),
    "mt5": ("MT5ForConditionalGeneration", NUMBERED, WHOLE_T5),
    "umt5": ("UMT5ForConditionalGeneration", NUMBERED, WHOLE_T5),
    "umt5, an encoder alone": ("UMT5EncoderModel", NUMBERED, ENCODER),
    "t5, a sequence classified": ("T5ForSequenceClassification", NUMBERED, INSIDE),
    "t5, tokens classified": ("T5ForTokenClassification", NUMBERED, dict([*INSIDE.items()][:1])),
    "t5, questions answered": ("T5ForQuestionAnswering", NUMBERED, SIDES),
    "vit": ("ViTModel", VIT, {}),
    "vit with classes": ("ViTForImageClassification", VIT | {"num_labels": 11}, {}),
    "vit for masked images": (
        "ViTForMaskedImageModeling",
        VIT | {"qkv_bias": False, "encoder_stride": 4},
        {},
    ),
}


@in_dtypes("name", FILES, low=("falcon of groups", "gpt2, untied", "t5 with a head", "vit"))
def test_a_file_goes_there_and_back(name, dtype, tmp_path):
    kind, says, ties = FILES[name]
    torch.manual_seed(0)
    kind = getattr(tf, kind)
    passed = roundtrip(scattered(kind(kind.config_class(**says)), dtype), tmp_path)
    assert passed == {key: f"tied to {same}" for key, same in ties.items()}
