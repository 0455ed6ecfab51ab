"""zeromodels' text models, converted from the config and the weights of a model of transformers.

`config_from_hf` and `transfer_from_hf` are what its `from_hf` calls on a downloaded checkpoint. The
config is in the older form of published files, in which `rope_theta` stands by itself.
"""

import importlib
import os
from functools import partial
from typing import Any

import torch

from gallery.by_value import layout_by_value
from gallery.port import Port, Subject
from gallery.ports.keras_hub_text import (
    DECODERS,
    ENCODERS,
    GROUPED,
    PADDED,
    SIZES,
    T,
    seen,
    tokens,
)
from jax_attn.parity import Pair

_BERT_LIKE = {"embedding_size": 24, **SIZES}
ROWS: dict[str, tuple[str, str, dict[str, Any]]] = {
    # name -> its module, class, and the model type and fields of the config
    **{
        name: (module, kind, *DECODERS[name])
        for name, module, kind in (
            ("Llama, rms_norm_eps 1e-5", "llama", "LlamaModel"),
            ("Mistral, window", "mistral", "MistralModel"),
            ("Gemma", "gemma", "GemmaModel"),
            ("Gemma 2, query_pre_attn_scalar another", "gemma2", "Gemma2Model"),
            ("Gemma 3", "gemma3", "Gemma3Model"),
            ("Qwen 2", "qwen2", "Qwen2Model"),
            ("Qwen 3, rms_norm_eps 1e-6", "qwen3", "Qwen3Model"),
            ("Qwen 3 MoE", "qwen3_moe", "Qwen3MoeModel"),
            ("Mixtral", "mixtral", "MixtralModel"),
            ("GPT-2", "gpt2", "GPT2Model"),
        )
    },
    **{
        name: (module, kind, *ENCODERS[name])
        for name, module, kind in (
            ("BERT", "bert", "BertModel"),
            ("RoBERTa", "roberta", "RobertaModel"),
            ("XLM-RoBERTa", "xlm_roberta", "XLMRobertaModel"),
        )
    },
    "ELECTRA": ("electra", "ElectraModel", "electra", _BERT_LIKE),
    "MPNet": ("mpnet", "MPNetModel", "mpnet", {**SIZES, "pad_token_id": 1}),
    "GLM": ("glm", "GlmModel", "glm", {**GROUPED, "attention_bias": True}),
    "ModernBERT": (
        "modernbert",
        "ModernBertModel",
        "modernbert",
        {**SIZES, "local_attention": 6, "global_attn_every_n_layers": 2}
        | {"cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2},
    ),
}


def _their_states(module: Any, input_ids: Any, attention_mask: Any = None) -> Any:
    result = module(input_ids, attention_mask=attention_mask)
    return seen(result.last_hidden_state, attention_mask)


def _our_states(model: Any, input_ids: Any, attention_mask: Any = None) -> Any:
    mask = 0 * input_ids + 1 if attention_mask is None else attention_mask
    known = {"input_ids": input_ids, "attention_mask": mask, "token_type_ids": 0 * input_ids}
    result = model({name: value for name, value in known.items() if name in model.input})
    states = result["last_hidden_state"] if isinstance(result, dict) else result
    return seen(states, attention_mask)


def _published(config: Any) -> dict[str, Any]:
    """Return a config as published files have it."""
    fields = config.to_dict()
    rope = fields.get("rope_parameters") or {}
    return {**({"rope_theta": rope["rope_theta"]} if "rope_theta" in rope else {}), **fields}


def _subject(
    module: str, kind: str, model_type: str, fields: dict[str, Any], dtype: str
) -> Subject:
    os.environ["KERAS_BACKEND"] = "jax"
    import keras
    import transformers
    from small_transformers import randomized

    config = transformers.AutoConfig.for_model(model_type, **fields, use_cache=False)
    config._attn_implementation = "eager"
    is_decoder = "num_key_value_heads" in fields
    auto = transformers.AutoModelForCausalLM if is_decoder else transformers.AutoModel
    whole = auto.from_config(config).eval()
    randomized(whole)
    keras.config.set_dtype_policy(dtype)
    models = importlib.import_module(f"zeromodels.models.{module}.{module}_model")
    port = getattr(models, kind)(**getattr(models, kind).config_from_hf(_published(config)))
    weights = {name: x.detach().numpy() for name, x in whole.state_dict().items()}
    getattr(models, kind).transfer_from_hf(port, weights)
    reference = (whole.base_model if is_decoder else whole).to(getattr(torch, dtype))
    pad = fields.get("pad_token_id", 0)
    pair = Pair(
        reference,
        port,
        tokens(T),
        layout=layout_by_value(reference, port),
        reference_call=_their_states,
        port_call=_our_states,
    )
    return Subject(pair, {"padding": tokens(T, PADDED, pad)})


PORTS = tuple(
    Port(f"zeromodels {name}", "zeromodels", partial(_subject, *row)) for name, row in ROWS.items()
)
