"""BERT, RoBERTa, XLM-RoBERTa, CamemBERT and Electra: post-norm encoders.

As a decoder, each is causal and may also have cross-attention.
"""

from jax_attn.families.config import Reading
from jax_attn.families.family import Family, Prefixes
from jax_attn.families.traits import (
    ClassifierTraits,
    EmbeddingTraits,
    MLPTraits,
    ModelTraits,
    NormTraits,
    PositionTraits,
    Traits,
    VocabularyTraits,
)
from jax_attn.families.whole import activation, architecture, is_tied, padding, stacked
from jax_attn.transfer import (
    EMBEDDING,
    LAYER_NORM,
    LINEAR,
    Layout,
    Sizes,
    ignored,
    linear,
    refused,
    row,
    spellings,
    tied,
)
from jax_attn.transfer.table.layouts import projections

_CROSS = "crossattention"
_COUNTED = "positions counted from 0, which are computed instead"
_RELATIVE = "relative position embeddings are not supported; expected absolute positions"


def _norm(torch_prefix: str, flax_prefix: str) -> Layout:
    """Return the table of a norm; early files call its scale and bias gamma and beta."""
    first = Layout(row("gamma", "scale"), row("beta", "bias"))
    return spellings(LAYER_NORM, first).under(torch_prefix, flax_prefix)


def _block(config: Reading) -> Layout:
    return Layout(
        projections("self.query", "self.key", "self.value", "output.dense"),
        refused("self.distance_embedding.weight", _RELATIVE),
    )


def _rest(config: Reading) -> Layout:
    theirs, ours = "encoder.layer.{layer}", "layers.{layer}"
    return Layout(
        EMBEDDING.under("embeddings.word_embeddings", "token_embedding"),
        EMBEDDING.under("embeddings.position_embeddings", "position_embedding"),
        EMBEDDING.under("embeddings.token_type_embeddings", "type_embedding"),
        _norm("embeddings.LayerNorm", "embedding_norm"),
        LINEAR.under("embeddings_project", "embedding_projection"),
        _norm(f"{theirs}.attention.output.LayerNorm", f"{ours}.attention_norm"),
        _norm(f"{theirs}.{_CROSS}.output.LayerNorm", f"{ours}.cross_attention_norm"),
        LINEAR.under(f"{theirs}.intermediate.dense", f"{ours}.mlp.up"),
        LINEAR.under(f"{theirs}.output.dense", f"{ours}.mlp.down"),
        _norm(f"{theirs}.output.LayerNorm", f"{ours}.mlp_norm"),
        LINEAR.under("pooler.dense", "pooler"),
        ignored("embeddings.position_ids", _COUNTED),
        ignored("embeddings.token_type_ids", "zeros, which are computed instead"),
    )


def _head(config: Reading) -> Layout:
    kind = config.get("model_type")
    return Layout(
        _HEADS.get(kind, _roberta_head)(config),
        LINEAR.under("classifier.dense", "classifier.dense"),
        LINEAR.under("classifier.out_proj", "classifier.out"),
        LINEAR.under("classifier", "classifier"),
        LINEAR.under("qa_outputs", "qa_outputs"),
    )


def _bert_head(config: Reading) -> Layout:
    return Layout(
        LINEAR.under("cls.predictions.transform.dense", "lm_head.dense"),
        _norm("cls.predictions.transform.LayerNorm", "lm_head.norm"),
        _logits(config, "cls.predictions", "bert"),
        LINEAR.under("cls.seq_relationship", "seq_relationship"),
    )


def _roberta_head(config: Reading) -> Layout:
    return Layout(
        LINEAR.under("lm_head.dense", "lm_head.dense"),
        _norm("lm_head.layer_norm", "lm_head.norm"),
        _logits(config, "lm_head", "roberta"),
    )


def _logits(config: Reading, head: str, root: str) -> Layout:
    """Return the table of the decoder and the bias next to it, which is the decoder's if tied."""
    if not config.flag("tie_word_embeddings", default=True):
        return Layout(
            LINEAR.under(f"{head}.decoder", "lm_head"),
            ignored(f"{head}.bias", "unused, as the decoder has its own bias"),
        )
    return Layout(
        row(f"{head}.bias", "lm_head.bias"),
        tied(f"{head}.decoder.bias", f"{head}.bias"),
        tied(f"{head}.decoder.weight", f"{root}.embeddings.word_embeddings.weight"),
    )


def _electra_head(config: Reading) -> Layout:
    embedding = "electra.embeddings.word_embeddings.weight"
    is_tied = config.flag("tie_word_embeddings", default=True)
    return Layout(
        LINEAR.under("generator_predictions.dense", "lm_head.dense"),
        _norm("generator_predictions.LayerNorm", "lm_head.norm"),
        row("generator_lm_head.bias", "lm_head.bias"),
        tied("generator_lm_head.weight", embedding)
        if is_tied
        else row("generator_lm_head.weight", "lm_head.kernel", linear),
        LINEAR.under("discriminator_predictions.dense", "discriminator.dense"),
        LINEAR.under("discriminator_predictions.dense_prediction", "discriminator.out"),
        LINEAR.under("sequence_summary.summary", "summary"),
    )


_HEADS = {"bert": _bert_head, "electra": _electra_head}

_DEFAULTS = {"electra": (256, 4)}
"""model_type -> D and N if the config lacks them."""


def _traits(config: Reading, prefix: str) -> Traits:
    positions = config.get("position_embedding_type") or "absolute"
    if positions != "absolute":
        config.refuse("position_embedding_type", positions, "'absolute'")
    D, N = _DEFAULTS.get(config.get("model_type"), (768, 12))
    D = config.number("hidden_size", default=D)
    N = config.number("num_attention_heads", default=N)
    H = config.divided(("hidden_size", D), ("num_attention_heads", N))
    cross = prefix.endswith(_CROSS)
    is_causal = config.flag("is_decoder", default=False) and not cross
    return Traits(D, Sizes(N, N, H), is_causal=is_causal, cross=cross)


def _model(config: Reading, attention: tuple[Traits, ...]) -> ModelTraits:
    kind = config.get("model_type")
    is_bert, D = kind == "bert", config.number("hidden_size", default=768)
    norm = NormTraits("layer", config.real("layer_norm_eps", default=1e-12))
    between = activation(config, "hidden_act", "gelu")
    rows = config.number("max_position_embeddings", default=512)
    positions = PositionTraits(rows)
    if not is_bert:
        pad = config.number("pad_token_id", default=1, least=0)
        positions = PositionTraits(rows, 0, "tokens", pad)
    vocabulary = config.number("vocab_size", default=50265 if kind == "roberta" else 30522)
    embedding = EmbeddingTraits(
        vocabulary,
        width=D,
        positions=positions,
        types=config.number("type_vocab_size", default=2),
        norm=norm,
        pad=padding(config, vocabulary, 0 if is_bert else 1),
    )
    mlp = MLPTraits(config.number("intermediate_size", default=3072), between)
    return ModelTraits(
        D,
        embedding,
        stacked(attention, mlp, norm, "post"),
        final_norm=None,
        lm_head=VocabularyTraits(
            is_tied(config, default=True),
            use_bias=True,
            activation=between if is_bert else "gelu",
            norm=norm,
        ),
        classifier=_classes(config, is_bert),
    )


def _classes(config: Reading, is_bert: bool) -> ClassifierTraits:
    """Choose the head by the model's class: every class calls its last layer "classifier"."""
    named = architecture(config)
    if named.endswith("ForTokenClassification"):
        return ClassifierTraits("each")
    if is_bert or named.endswith("ForMultipleChoice"):
        return ClassifierTraits("pooled")
    return ClassifierTraits("first", has_dense=True)


def _optional(config: Reading) -> tuple[str, ...]:
    """List the optional parts; Electra needs a projection if its embeddings' width is not D."""
    width = config.number("embedding_size", default=128)
    is_electra = config.get("model_type") == "electra"
    projects = is_electra and width != config.number("hidden_size", default=_DEFAULTS["electra"][0])
    return ("pooler", "cross_attention_norm") + ("embedding_projection",) * (not projects)


def _new_root(config: Reading) -> str:
    kind = config.get("model_type")
    return kind if kind in ("bert", "electra") else "roberta"


BERT = Family(
    *("bert", _block, _rest, _head, _traits),
    places=(
        Prefixes("encoder.layer.{layer}.attention"),
        Prefixes(f"encoder.layer.{{layer}}.{_CROSS}", "layers.{layer}.cross_attention"),
    ),
    roots=("bert", "roberta", "electra", ""),
    new_root=_new_root,
    also=("roberta", "xlm-roberta", "camembert", "electra"),
    model_of=_model,
    without_model=("electra",),
    optional_of=_optional,
)
