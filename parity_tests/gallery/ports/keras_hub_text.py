"""KerasHub's text models, converted from a folder of transformers with random weights.

A row is a family with one config. `Backbone.from_preset(folder)` reads the folder as it reads a
checkpoint. Weights are paired by their numbers, so that gradients of parameters are compared.
"""

import os
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from gallery.by_value import layout_by_value
from gallery.port import Port, Subject
from jax_attn.parity import Pair

B, T, PADDED = 2, 11, 8
VOCABULARY, WINDOW = 97, 6
"""All inputs are longer than the window, also what is left of a padded one."""

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": 8, "bos_token_id": 1, "eos_token_id": 2}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 20, "num_experts": 3}
_UNTIED = {"tie_word_embeddings": False}
_GPT2 = {"vocab_size": VOCABULARY, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 64}
_DISTIL = {"vocab_size": VOCABULARY, "dim": 24, "hidden_dim": 40, "n_layers": 2, "n_heads": 4}
_QWEN2 = {**GROUPED, "hidden_size": 32, "use_sliding_window": False}

_ROBERTA = {**SIZES, "pad_token_id": 1, "type_vocab_size": 1, "layer_norm_eps": 1e-5}

DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT-2": ("gpt2", _GPT2),
    "Llama, rms_norm_eps 1e-6": ("llama", {**GROUPED, "head_dim": 6}),
    "Llama, rms_norm_eps 1e-5": ("llama", {**GROUPED, "head_dim": 6, "rms_norm_eps": 1e-5}),
    "Llama, tied": ("llama", {**GROUPED, "head_dim": 6, "tie_word_embeddings": True}),
    "Llama, head_dim 8": ("llama", GROUPED),
    "Llama, attention_bias": ("llama", {**GROUPED, "head_dim": 6, "attention_bias": True}),
    "Mistral, no window": ("mistral", {**GROUPED, "sliding_window": None}),
    "Mistral, window": ("mistral", {**GROUPED, "sliding_window": WINDOW}),
    "Mixtral": ("mixtral", {**GROUPED, "head_dim": 6, "num_local_experts": 3} | _UNTIED),
    "Mixtral, window": (
        "mixtral",
        {**GROUPED, "head_dim": 6, "num_local_experts": 3, "sliding_window": WINDOW} | _UNTIED,
    ),
    "Gemma": ("gemma", {**GROUPED, "hidden_activation": "gelu_pytorch_tanh"}),
    "Gemma 2, query_pre_attn_scalar = head_dim": (
        "gemma2",
        {**GROUPED, "query_pre_attn_scalar": 8, "sliding_window": WINDOW},
    ),
    "Gemma 2, query_pre_attn_scalar = hidden_size / heads": (
        "gemma2",
        {**GROUPED, "query_pre_attn_scalar": 6, "sliding_window": WINDOW},
    ),
    "Gemma 2, query_pre_attn_scalar another": (
        "gemma2",
        {**GROUPED, "query_pre_attn_scalar": 20, "sliding_window": WINDOW},
    ),
    "Gemma 3": (
        "gemma3_text",
        {**GROUPED, "query_pre_attn_scalar": 8, "sliding_window": WINDOW, "num_hidden_layers": 6},
    ),
    "Gemma 3, another order of layers": (
        "gemma3_text",
        {**GROUPED, "query_pre_attn_scalar": 8, "sliding_window": WINDOW}
        | {"layer_types": ["sliding_attention", "full_attention"]},
    ),
    "Qwen 2": ("qwen2", _QWEN2),
    "Qwen 2, tied": ("qwen2", {**_QWEN2, "tie_word_embeddings": True}),
    "Qwen 2, window": (
        "qwen2",
        {**_QWEN2, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "Qwen 3, rms_norm_eps 1e-6": ("qwen3", {**GROUPED, "tie_word_embeddings": True}),
    "Qwen 3, untied": ("qwen3", {**GROUPED, "tie_word_embeddings": False}),
    "Qwen 3, attention_bias": (
        "qwen3",
        {**GROUPED, "tie_word_embeddings": True, "attention_bias": True},
    ),
    "Qwen 2 MoE": (
        "qwen2_moe",
        {**_QWEN2, "shared_expert_intermediate_size": 28} | _EXPERTS | _UNTIED,
    ),
    "Qwen 3 MoE": ("qwen3_moe", {**GROUPED, "norm_topk_prob": True} | _EXPERTS | _UNTIED),
    "SmolLM3": (
        "smollm3",
        {**GROUPED, "head_dim": 6, "no_rope_layers": [1, 0], "tie_word_embeddings": True},
    ),
    "GPT-OSS": (
        "gpt_oss",
        {**GROUPED, "num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": WINDOW},
    ),
}
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "BERT": ("bert", SIZES),
    "BERT, gelu_new": ("bert", {**SIZES, "hidden_act": "gelu_new"}),
    "BERT, relu": ("bert", {**SIZES, "hidden_act": "relu"}),
    "RoBERTa": ("roberta", _ROBERTA),
    "XLM-RoBERTa": ("xlm-roberta", _ROBERTA),
    "DistilBERT": ("distilbert", {**_DISTIL, "max_position_embeddings": 64}),
    "ALBERT": ("albert", {**SIZES, "embedding_size": 16}),
    "ALBERT, gelu": ("albert", {**SIZES, "embedding_size": 16, "hidden_act": "gelu"}),
    "ESM-2": (
        "esm",
        {**SIZES, "position_embedding_type": "rotary", "mask_token_id": 3}
        | {"token_dropout": False, "pad_token_id": 1},
    ),
    "ESM-2, token_dropout": (
        "esm",
        {**SIZES, "position_embedding_type": "rotary", "mask_token_id": 3}
        | {"token_dropout": True, "pad_token_id": 1},
    ),
}

WITH_HEADS = ("albert", "distilbert", "roberta", "xlm-roberta")
"""Their converters read the names of a file that has the heads of pretraining, as published."""


def tokens(length: int, kept: int | None = None, pad: int = 0) -> dict[str, np.ndarray]:
    """Return tokens; with `kept`, the second row is padded after so many, and there is a mask."""
    tokens = np.random.default_rng(length).integers(4, VOCABULARY, (B, length), np.int32)
    if kept is None:
        return {"input_ids": tokens}
    mask = np.ones_like(tokens)
    mask[1, kept:] = 0
    return {"input_ids": np.where(mask == 1, tokens, pad), "attention_mask": mask}


def seen(output: Any, attention_mask: Any) -> Any:
    """Return an output without its padded places, where nothing is promised."""
    return output if attention_mask is None else output * attention_mask[..., None]


def _given(input_ids: Any, attention_mask: Any) -> dict[str, Any]:
    mask = 0 * input_ids + 1 if attention_mask is None else attention_mask
    return {"token_ids": input_ids, "padding_mask": mask}


def _their_logits(module: Any, input_ids: Any, attention_mask: Any = None) -> Any:
    return seen(module(input_ids, attention_mask=attention_mask).logits, attention_mask)


def _our_logits(backbone: Any, input_ids: Any, attention_mask: Any = None) -> Any:
    hidden = backbone(_given(input_ids, attention_mask))
    embedding = backbone.get_layer("token_embedding")
    return seen(embedding(hidden, reverse=True), attention_mask)


def _their_states(module: Any, input_ids: Any, attention_mask: Any = None) -> Any:
    result = module(input_ids, attention_mask=attention_mask)
    outputs = {"sequence": seen(result.last_hidden_state, attention_mask)}
    if getattr(module, "pooler", None) is not None:
        outputs["pooled"] = result.pooler_output
    return outputs


def _our_states(backbone: Any, input_ids: Any, attention_mask: Any = None) -> Any:
    given = _given(input_ids, attention_mask)
    if "segment_ids" in backbone.input:
        given["segment_ids"] = 0 * input_ids
    result = backbone(given)
    if not isinstance(result, dict):
        return {"sequence": seen(result, attention_mask)}
    sequence = seen(result["sequence_output"], attention_mask)
    return {"sequence": sequence, "pooled": result["pooled_output"]}


def converted(model: torch.nn.Module, dtype: str) -> Any:
    """Return KerasHub's backbone of a model of transformers, through a folder."""
    os.environ["KERAS_BACKEND"] = "jax"
    import keras_hub

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return keras_hub.models.Backbone.from_preset(folder, dtype=dtype)


def _subject(auto: str, model_type: str, fields: dict[str, Any], dtype: str) -> Subject:
    import transformers
    from small_transformers import randomized

    config = transformers.AutoConfig.for_model(model_type, **fields, use_cache=False)
    config._attn_implementation = "eager"
    is_decoder = auto == "AutoModelForCausalLM"
    auto = auto or ("AutoModelForPreTraining" if model_type in WITH_HEADS else "AutoModel")
    whole = getattr(transformers, auto).from_config(config).eval()
    randomized(whole)
    port = converted(whole, dtype)
    model = (whole if is_decoder else whole.base_model).to(getattr(torch, dtype))
    pad = fields.get("pad_token_id", 0)
    pair = Pair(
        model,
        port,
        tokens(T),
        layout=layout_by_value(model, port),
        reference_call=_their_logits if is_decoder else _their_states,
        port_call=_our_logits if is_decoder else _our_states,
    )
    return Subject(pair, {"padding": tokens(T, PADDED, pad)})


def _ports(auto: str, rows: dict[str, tuple[str, dict[str, Any]]]) -> tuple[Port, ...]:
    made: Callable[..., Any] = partial(_subject, auto)
    return tuple(
        Port(f"keras-hub {name}", "keras-hub", partial(made, *row)) for name, row in rows.items()
    )


PORTS = (*_ports("AutoModelForCausalLM", DECODERS), *_ports("", ENCODERS))
