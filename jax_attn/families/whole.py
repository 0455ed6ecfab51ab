"""Read the parts of a whole model's config that are the same in every family."""

from collections.abc import Iterable, Mapping
from typing import Any

from jax_attn.families.config import NUM_HEADS, Config, Reading
from jax_attn.families.traits import (
    ACTIVATION_NAMES,
    BlockTraits,
    ClassifierTraits,
    EmbeddingTraits,
    MLPTraits,
    ModelTraits,
    NormPlacement,
    NormTraits,
    Traits,
    VocabularyTraits,
)
from jax_attn.transfer.problems import Problem

_ACTIVATIONS = ("hidden_act", "activation_function", "hidden_activation")
QUANTIZED = "quantization_config"
"""The field of configs that says how weights are quantized."""
_EPSILONS = ("norm_eps", "norm_epsilon")

_DEQUANTIZED = (
    "null, as only plain numbers are supported (float16, bfloat16, float32, float64); dequantize "
    "them in transformers, AutoModelForCausalLM.from_pretrained(PATH).dequantize()"
    ".save_pretrained(NEW), and pass NEW"
)

_MXFP4 = {"quant_method", "modules_to_not_convert", "dequantize"}
"""The fields of a quantization_config of MXFP4 that do not change the numbers."""

_UNSUPPORTED = {
    QUANTIZED: _DEQUANTIZED,
    "num_experts": "null: this model_type has no experts here",
    "num_local_experts": "null: this model_type has no experts here",
    "slow_but_exact": "false: if true, BLOOM omits biases when pretraining_tp is above 1",
    "pruned_heads": "null: pruned heads are not supported",
    "add_cross_attention": "false: cross-attention is not supported",
    "is_encoder_decoder": "false: encoder-decoders are not supported",
}
"""Fields that a model does not support, unless its family reads them, or they are null, false, 0 or
empty."""


_NEUTRAL = frozenset(
    name
    for names in (
        # The origin of a file, and the software that wrote it.
        "architectures author auto_map created_date custom_pipelines dtype is_llama_config "
        "language license model_type name num_steps sentence_transformers tokenizer_class "
        "torch_dtype torchscript transformers_version unsloth_fixed unsloth_version use_bfloat16",
        # Training.
        "activation_dropout attention_dropout attention_probs_dropout_prob attn_pdrop "
        "classifier_dropout classifier_dropout_prob dropout embd_pdrop gradient_checkpointing "
        "dropout_rate hidden_dropout hidden_dropout_prob init_std initializer_factor "
        "initializer_range layerdrop neftune_noise_alpha problem_type resid_pdrop "
        "router_aux_loss_coef router_jitter_noise "
        "sbert_ce_default_activation_function",
        # The outputs of a call, and the order of its sums.
        "attention_softmax_in_fp32 attn_implementation bias_dropout_fusion cache_implementation "
        "chunk_size_feed_forward inference_runner masked_softmax_fusion max_batch_size "
        "output_attentions output_hidden_states output_past output_router_logits pad_key_length "
        "pre_allocate_kv_cache pretraining_tp reorder_and_upcast_attn return_dict "
        "scale_attention_softmax_in_fp32 use_cache use_flash_attn use_return_dict "
        "validate_runner_input",
        # Classes and special tokens.
        "bad_words_ids begin_suppress_tokens bos_token_id decoder_start_token_id eos_token_id "
        "finetuning_task forced_bos_token_id forced_eos_token_id id2label label2id mask_token_id "
        "num_labels pad_token_id prefix sep_token_id suppress_tokens task_specific_params "
        "unk_token_id",
        # Generation.
        "diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size "
        "exponential_decay_length_penalty length_penalty max_length min_length "
        "no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_scores "
        "remove_invalid_values repetition_penalty return_dict_in_generate temperature top_k top_p "
        "typical_p",
        # Other classes of the same family, and other software.
        "directionality emb_size ff_factor initial_context_length is_decoder learned_embeddings "
        "max_sequence_length n_ctx offset_alibi pooler_fc_size pooler_num_attention_heads "
        "pooler_num_fc_layers pooler_size_per_head pooler_type predict_special_tokens "
        "runner_max_sequence_length seq_length skip_bias_add skip_bias_add_qkv "
        "sliding_window_size summary_activation summary_first_dropout summary_last_dropout "
        "summary_proj_to_labels summary_type summary_use_proj",
    )
    for name in names.split()
)
"""Fields of published configs that change no output in eval mode."""


def check_values(read: Reading) -> None:
    """Refuse what is invalid in every family: a null head count, a bad epsilon or activation."""
    # A reading of its own: `read.names` must have only the names that the family reads.
    own = Reading(read.config, read.problems, read.file)
    for name in NUM_HEADS:
        if name in own.config and own.get(name) is None:
            own.refuse(name, None, "a whole number ≥ 1")
    for name in own.config:
        if name.endswith(_EPSILONS):
            own.real(name, default=None)
    for name in _ACTIVATIONS:
        if not isinstance(value := own.get(name), str | None):
            own.refuse(name, value, f"one of {', '.join(ACTIVATION_NAMES)}")


def unusable(config: Config) -> list[Problem]:
    """List why the weights of a config cannot be used here, whatever its family; empty if they can.

    The reasons are invalid values, and quantized weights.
    """
    read = Reading(config)
    check_values(read)
    if (value := config.get(QUANTIZED)) and not is_mxfp4(config):
        read.refuse(QUANTIZED, value, _DEQUANTIZED)
    return [*read.problems]


def is_mxfp4(config: Config) -> bool:
    """Return whether a config says that its experts are MXFP4, which are read as bfloat16."""
    how = config.get(QUANTIZED)
    kind = config.get("model_type")
    named = kind is None and architecture(Reading(config)).startswith("GptOss")
    if not (kind == "gpt_oss" or named) or not isinstance(how, Mapping):
        return False
    return how.get("quant_method") == "mxfp4" and how.keys() <= _MXFP4


def as_plain(config: Config) -> dict[str, Any]:
    """Return the config of the same model with plain numbers."""
    return {name: value for name, value in config.items() if name != QUANTIZED}


def check_supported(config: Reading, *, is_causal: bool) -> None:
    """Refuse, by name, fields that change a model in a way that no traits describe.

    is_causal: whether a query of the model's blocks sees no later key.
    """
    if is_mxfp4(config.config):
        config.names.add(QUANTIZED)
    for name, expected in _UNSUPPORTED.items():
        if name not in config.names and (value := config.get(name)):
            config.refuse(name, value, expected)
    # The default is true: false or null turns a decoder into an encoder.
    if is_causal and not (value := config.get("is_causal", True)):
        config.refuse("is_causal", value, "true: decoders that see later tokens are not supported")


def refuse_unread(config: Reading) -> None:
    """Refuse the fields that nothing has read, as they may change the model in an unknown way.

    Null, false, 0 and empty values mean that a feature is off; so a field whose default is true
    must be read elsewhere, as is_causal is. Names that begin with an underscore or have a dot are
    not fields of models.
    """
    for name in sorted(config.config.keys() - config.names - _NEUTRAL):
        if not name.startswith("_") and "." not in name and (value := config.get(name)):
            expected = "no such field: it may change the model; if it does not, delete it"
            config.refuse(name, value, expected)


def activation(config: Reading, name: str, default: str) -> str:
    """Return the `jax_attn.models` name of the activation that a config names."""
    named = default if config.get(name) is None else config.get(name)
    if not isinstance(named, str) or named not in ACTIVATION_NAMES:
        config.refuse(name, named, f"one of {', '.join(ACTIVATION_NAMES)}")
        return ACTIVATION_NAMES[default]
    return ACTIVATION_NAMES[named]


def padding(config: Reading, vocab_size: int, default: int | None = None) -> int | None:
    """Return the token that transformers gives torch.nn.Embedding as padding_idx, or None.

    default: used if the config lacks pad_token_id; a null there means no token.
    """
    config = config.over({"pad_token_id": default})
    pad = config.number("pad_token_id", default=None, least=-1)
    return vocab_size - 1 if pad == -1 else pad  # torch counts from the end


def stacked(
    attention: Iterable[Traits],
    mlp: MLPTraits,
    norm: NormTraits,
    placement: NormPlacement,
    *,
    shares_norm: bool = False,
) -> tuple[BlockTraits, ...]:
    """Return one block for each attention; all have the same MLP, norm and placement."""
    return tuple(BlockTraits(each, mlp, norm, placement, shares_norm) for each in attention)


def architecture(config: Reading) -> str:
    """Return the first class that a config names, such as "BertForMaskedLM"; "" for none."""
    names = config.get("architectures")
    first = names[0] if isinstance(names, list) and names else ""
    return first if isinstance(first, str) else ""


def is_tied(config: Reading, *, default: bool) -> bool:
    """Return whether the language model's head uses the token table as its weight."""
    return config.flag("tie_word_embeddings", default=default)


def decoder(
    config: Reading,
    embed_dim: int,
    embedding: EmbeddingTraits,
    blocks: tuple[BlockTraits, ...],
    final_norm: NormTraits | None,
    *,
    tied: bool,
    use_bias: bool = False,
    softcap: float | None = None,
) -> ModelTraits:
    """Return the traits of a decoder, with its heads for the vocabulary and for classes.

    tied: whether the former uses the token table if the config does not say; use_bias, softcap: its
    own. The latter reads the last token or each one.
    """
    head = VocabularyTraits(is_tied(config, default=tied), use_bias, softcap=softcap)
    if architecture(config).endswith("ForTokenClassification"):
        has_bias = config.flag("token_classification_bias", default=True)
        classes = ClassifierTraits("each", use_bias=has_bias)
    else:
        pad = config.number("pad_token_id", default=None, least=-1)  # -1 is no token
        classes = ClassifierTraits("last", use_bias=False, pad=pad)
    return ModelTraits(embed_dim, embedding, blocks, final_norm, head, classes)
