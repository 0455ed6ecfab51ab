"""A small model of every family, as transformers builds it, and what its attention is."""

from dataclasses import dataclass

import transformers as tf

N, H, LAYERS = 6, 4, 2  # rotary positions need an even H
D = N * H
SIZES = {"hidden_size": D, "num_attention_heads": N, "num_hidden_layers": LAYERS, "vocab_size": 41}
PLAIN = SIZES | {"intermediate_size": 29, "max_position_embeddings": 17}
GROUPED = PLAIN | {"num_key_value_heads": 3, "head_dim": 10}
GPT2 = {"n_embd": D, "n_head": N, "n_layer": LAYERS, "vocab_size": 41, "n_positions": 17}
T5 = {"d_model": 31, "d_kv": 7, "num_heads": N, "num_layers": LAYERS, "d_ff": 29, "vocab_size": 41}
VIT = {"hidden_size": D, "num_attention_heads": N, "num_hidden_layers": LAYERS}
VIT |= {"intermediate_size": 29, "image_size": 8, "patch_size": 4}

BY_TURNS = "by key/value head"
IN_TURN = "query, key, value one after another"


@dataclass(frozen=True)
class Row:
    """A model of transformers', and what is to be said of it. does: some of its traits."""

    model: type
    config: tf.PretrainedConfig
    family: str
    design: str
    K: int
    H: int = H
    packed: str = ""
    layers: int = LAYERS
    does: tuple = ()
    tied: tuple = ()


ROWS = {
    "bert": Row(
        tf.BertForMaskedLM,
        tf.BertConfig(**PLAIN),
        "bert",
        "MHA",
        N,
        does=(("use_bias", True), ("is_causal", False)),
        tied=("cls.predictions.decoder.weight",),
    ),
    "bert alone": Row(tf.BertModel, tf.BertConfig(**PLAIN), "bert", "MHA", N),
    "roberta": Row(tf.RobertaForMaskedLM, tf.RobertaConfig(**PLAIN), "bert", "MHA", N),
    "vit": Row(tf.ViTModel, tf.ViTConfig(**VIT), "vit", "MHA", N),
    "gpt2": Row(
        tf.GPT2LMHeadModel,
        tf.GPT2Config(**GPT2),
        "gpt2",
        "MHA",
        N,
        packed=IN_TURN,
        does=(("is_causal", True),),
        tied=("lm_head.weight",),
    ),
    "gpt_bigcode": Row(
        tf.GPTBigCodeForCausalLM,
        tf.GPTBigCodeConfig(**GPT2),
        "gpt_bigcode",
        "MQA",
        1,
        packed=IN_TURN,
    ),
    "gpt_bigcode of many heads": Row(
        tf.GPTBigCodeForCausalLM,
        tf.GPTBigCodeConfig(**GPT2, multi_query=False),
        "gpt_bigcode",
        "MHA",
        N,
        packed=BY_TURNS,
    ),
    "falcon of one": Row(
        tf.FalconForCausalLM, tf.FalconConfig(**SIZES), "falcon", "MQA", 1, packed=IN_TURN
    ),
    "falcon of groups": Row(
        tf.FalconForCausalLM,
        tf.FalconConfig(**SIZES, new_decoder_architecture=True, num_kv_heads=3),
        "falcon",
        "GQA",
        3,
        packed=BY_TURNS,
    ),
    "falcon of many": Row(
        tf.FalconForCausalLM,
        tf.FalconConfig(**SIZES, multi_query=False),
        "falcon",
        "MHA",
        N,
        packed=BY_TURNS,
    ),
    "gpt_neox": Row(
        tf.GPTNeoXForCausalLM,
        tf.GPTNeoXConfig(**PLAIN, rope_parameters={"partial_rotary_factor": 0.5}),
        "gpt_neox",
        "MHA",
        N,
        packed=BY_TURNS,
    ),
    "bloom": Row(
        tf.BloomForCausalLM,
        tf.BloomConfig(hidden_size=D, n_head=N, n_layer=LAYERS, vocab_size=41),
        "bloom",
        "MHA",
        N,
        packed=BY_TURNS,
    ),
    "t5": Row(
        tf.T5ForConditionalGeneration,
        tf.T5Config(**T5, num_decoder_layers=3),
        "t5",
        "MHA",
        N,
        H=7,
        layers=LAYERS + 3,
        does=(("use_bias", False),),
    ),
    "llama": Row(
        tf.LlamaForCausalLM,
        tf.LlamaConfig(**GROUPED),
        "llama",
        "GQA",
        3,
        H=10,
        does=(("is_causal", True), ("use_bias", False)),
    ),
    "mistral": Row(
        tf.MistralModel,
        tf.MistralConfig(**GROUPED, sliding_window=5),
        "llama",
        "GQA",
        3,
        H=10,
        does=(("window", 5),),
    ),
    "qwen2": Row(
        tf.Qwen2ForCausalLM,
        tf.Qwen2Config(**PLAIN, num_key_value_heads=1),
        "llama",
        "MQA",
        1,
        does=(("use_bias", True), ("use_out_bias", False)),
    ),
    "qwen3": Row(
        tf.Qwen3ForCausalLM,
        tf.Qwen3Config(**GROUPED),
        "llama",
        "GQA",
        3,
        H=10,
        does=(("qk_norm", {"kind": "rms", "epsilon": 1e-6}),),
    ),
}
