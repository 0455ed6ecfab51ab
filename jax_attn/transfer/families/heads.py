"""The heads that transformers puts on decoders, with no root before them."""

from jax_attn.transfer.families.config import flag
from jax_attn.transfer.families.family import Config
from jax_attn.transfer.layout import Layout
from jax_attn.transfer.layouts import LINEAR
from jax_attn.transfer.rows import tied

TASKS = Layout(
    LINEAR.under("score", "classifier"),
    LINEAR.under("classifier", "token_classifier"),
    LINEAR.under("qa_outputs", "qa_outputs"),
)


def lm_head(config: Config, embedding: str, *, tied_by_default: bool) -> Layout:
    """The table of a language model's head.

    embedding: the key of the weight that it shares where the config ties the two.
    """
    if flag(config, "tie_word_embeddings", default=tied_by_default):
        return Layout(tied("lm_head.weight", embedding))
    return LINEAR.under("lm_head", "lm_head")
