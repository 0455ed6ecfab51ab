"""A small model of every family, as transformers builds it, and what its attention is."""

from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers as tf

N, H, LAYERS = 6, 4, 2  # rotary positions need an even H
D = N * H
SIZES = {"hidden_size": D, "num_attention_heads": N, "num_hidden_layers": LAYERS, "vocab_size": 41}
PLAIN = SIZES | {"intermediate_size": 29, "max_position_embeddings": 17}
GROUPED = PLAIN | {"num_key_value_heads": 3, "head_dim": 10}
GPT2 = {"n_embd": D, "n_head": N, "n_layer": LAYERS, "vocab_size": 41, "n_positions": 17}
BLOOM = {"hidden_size": D, "n_head": N, "n_layer": LAYERS, "vocab_size": 41}
T5 = {"d_model": 31, "d_kv": 7, "num_heads": N, "num_layers": LAYERS, "d_ff": 29, "vocab_size": 41}
VIT = {"hidden_size": D, "num_attention_heads": N, "num_hidden_layers": LAYERS}
VIT |= {"intermediate_size": 29, "image_size": 8, "patch_size": 4}

EXPERTS = {"num_local_experts": 5, "num_experts_per_tok": 2}

BY_TURNS = "by key/value head"
IN_TURN = "query, key, value one after another"


@dataclass(frozen=True)
class FamilyModel:
    """A model of transformers', and what is to be said of it. does: some of its traits."""

    name: str
    says: dict
    family: str
    K: int
    H: int = H
    packed: str = ""
    layers: int = LAYERS
    does: dict = field(default_factory=dict)
    tied: tuple = ()

    @property
    def model(self) -> type:
        return getattr(tf, self.name)

    @property
    def config(self) -> tf.PretrainedConfig:
        return self.model.config_class(**self.says)

    @property
    def design(self) -> str:
        return {N: "MHA", 1: "MQA"}.get(self.K, "GQA")


ROWS = {
    "bert": FamilyModel(
        "BertForMaskedLM",
        PLAIN,
        "bert",
        N,
        does={"use_bias": True, "is_causal": False},
        tied=("cls.predictions.decoder.weight",),
    ),
    "bert alone": FamilyModel("BertModel", PLAIN, "bert", N),
    "roberta": FamilyModel("RobertaForMaskedLM", PLAIN, "bert", N),
    "vit": FamilyModel("ViTModel", VIT, "vit", N),
    "gpt2": FamilyModel(
        "GPT2LMHeadModel",
        GPT2,
        "gpt2",
        N,
        packed=IN_TURN,
        does={"is_causal": True},
        tied=("lm_head.weight",),
    ),
    "gpt_bigcode": FamilyModel("GPTBigCodeForCausalLM", GPT2, "gpt_bigcode", 1, packed=IN_TURN),
    "gpt_bigcode of many heads": FamilyModel(
        "GPTBigCodeForCausalLM", GPT2 | {"multi_query": False}, "gpt_bigcode", N, packed=BY_TURNS
    ),
    "falcon of one": FamilyModel("FalconForCausalLM", SIZES, "falcon", 1, packed=IN_TURN),
    "falcon of groups": FamilyModel(
        "FalconForCausalLM",
        SIZES | {"new_decoder_architecture": True, "num_kv_heads": 3},
        "falcon",
        3,
        packed=BY_TURNS,
    ),
    "falcon of many": FamilyModel(
        "FalconForCausalLM", SIZES | {"multi_query": False}, "falcon", N, packed=BY_TURNS
    ),
    "gpt_neox": FamilyModel(
        "GPTNeoXForCausalLM",
        PLAIN | {"rope_parameters": {"partial_rotary_factor": 0.5}},
        "gpt_neox",
        N,
        packed=BY_TURNS,
    ),
    "bloom": FamilyModel("BloomForCausalLM", BLOOM, "bloom", N, packed=BY_TURNS),
    "t5": FamilyModel(
        "T5ForConditionalGeneration",
        T5 | {"num_decoder_layers": 3},
        "t5",
        N,
        H=7,
        layers=LAYERS + 3,
        does={"use_bias": False},
    ),
    "llama": FamilyModel(
        "LlamaForCausalLM",
        GROUPED,
        "llama",
        3,
        H=10,
        does={"is_causal": True, "use_bias": False},
    ),
    "mistral": FamilyModel(
        "MistralModel", GROUPED | {"sliding_window": 5}, "llama", 3, H=10, does={"window": 5}
    ),
    "qwen2": FamilyModel(
        "Qwen2ForCausalLM",
        PLAIN | {"num_key_value_heads": 1},
        "llama",
        1,
        does={"use_bias": True, "use_out_bias": False},
    ),
    "qwen3": FamilyModel(
        "Qwen3ForCausalLM",
        GROUPED,
        "llama",
        3,
        H=10,
        does={"qk_norm": {"kind": "rms", "epsilon": 1e-6, "adds_one": False}},
    ),
    "mixtral": FamilyModel("MixtralForCausalLM", GROUPED | EXPERTS, "llama", 3, H=10),
    "qwen3_moe": FamilyModel(
        "Qwen3MoeForCausalLM", GROUPED | EXPERTS | {"moe_intermediate_size": 11}, "llama", 3, H=10
    ),
    "gpt_oss": FamilyModel(
        "GptOssForCausalLM",
        GROUPED | EXPERTS | {"sliding_window": 5},
        "gpt_oss",
        3,
        H=10,
        does={"use_bias": True, "sinks": True},
    ),
    "gemma3_text": FamilyModel(
        "Gemma3ForCausalLM",
        GROUPED | {"sliding_window": 5},
        "gemma2",
        3,
        H=10,
        does={"window": 5, "qk_norm": {"kind": "rms", "epsilon": 1e-6, "adds_one": True}},
        tied=("lm_head.weight",),
    ),
}


def saved_llama(folder: Path) -> Path:
    """A grouped Llama with its head and config, in a folder of its own."""
    torch.manual_seed(0)
    tf.LlamaForCausalLM(tf.LlamaConfig(**GROUPED)).save_pretrained(folder)
    return folder
