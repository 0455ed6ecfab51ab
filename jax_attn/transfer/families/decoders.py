"""What transformers' decoders have in common: norms, perceptrons, and heads without a root."""

from jax_attn.transfer.families.config import Reading
from jax_attn.transfer.table.layout import Layout
from jax_attn.transfer.table.layouts import BIASLESS, LAYER_NORM, LINEAR
from jax_attn.transfer.table.rows import tied

TASKS = Layout(
    LINEAR.under("score", "classifier"),
    LINEAR.under("classifier", "token_classifier"),
    LINEAR.under("qa_outputs", "qa_outputs"),
)


def norms(norm: Layout = LAYER_NORM) -> Layout:
    """The table of a block's two norms."""
    return Layout(
        norm.under("input_layernorm", "attention_norm"),
        norm.under("post_attention_layernorm", "mlp_norm"),
    )


def mlp(dense: Layout = LINEAR) -> Layout:
    """The table of a perceptron of two layers."""
    return Layout(
        dense.under("mlp.dense_h_to_4h", "mlp.up"), dense.under("mlp.dense_4h_to_h", "mlp.down")
    )


def heads(config: Reading, embedding: str, *, tied_by_default: bool = True) -> Layout:
    """The table of a language model's head, and of those for other tasks.

    embedding: the key of the weight that the first shares where the config ties the two.
    """
    if config.flag("tie_word_embeddings", default=tied_by_default):
        return Layout(tied("lm_head.weight", embedding), TASKS)
    return Layout(BIASLESS.under("lm_head", "lm_head"), TASKS)
