"""Llama as Meta publishes it: consolidated.*.pth beside a params.json.

Rotary pairs lie side by side, (2m, 2m + 1). The tables turn them to halves, (m, m + H/2): the
Flax side is that of transformers' Llama, and through the two tables the one becomes the other.
"""

from jax_attn.transfer.families.config import Reading
from jax_attn.transfer.families.family import Family, Place, RotaryTraits, Traits
from jax_attn.transfer.table.layout import Layout
from jax_attn.transfer.table.layouts import BIASLESS, EMBEDDING, RMS_NORM, projections
from jax_attn.transfer.table.rows import ignored
from jax_attn.transfer.table.steps import HeadSizes, to_half_split

_SCALED = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_length": 8192,
}
"""use_scaled_rope: as Meta's code has it, and no params.json. transformers has 32 for the factor
of Llama 3.2, whose params.json does not differ in this."""


def _block(config: Reading) -> Layout:
    halves = to_half_split()
    return Layout(
        projections("wq", "wk", "wv", "wo").through(halves, "q_proj", "k_proj"),
        ignored("inner_attention.rope.freqs", "frequencies, worked out from the config"),
    )


def _rest(config: Reading) -> Layout:
    layer = "layers.{layer}"
    return Layout(
        EMBEDDING.under("tok_embeddings", "token_embedding"),
        RMS_NORM.under(f"{layer}.attention_norm", f"{layer}.attention_norm"),
        RMS_NORM.under(f"{layer}.ffn_norm", f"{layer}.mlp_norm"),
        BIASLESS.under(f"{layer}.feed_forward.w1", f"{layer}.mlp.gate"),
        BIASLESS.under(f"{layer}.feed_forward.w2", f"{layer}.mlp.down"),
        BIASLESS.under(f"{layer}.feed_forward.w3", f"{layer}.mlp.up"),
        RMS_NORM.under("norm", "final_norm"),
        ignored("rope.freqs", "frequencies, worked out from the config"),
    )


def _head(config: Reading) -> Layout:
    return BIASLESS.under("output", "lm_head")


def _traits(config: Reading, prefix: str) -> Traits:
    D, N, H = config.share("dim", "n_heads")
    K = config.kv_heads("n_kv_heads", "n_heads")
    scaling = ("Llama3", _SCALED) if config.flag("use_scaled_rope", default=False) else None
    return Traits(
        D,
        HeadSizes(N, K, H),
        use_bias=False,
        use_out_bias=False,
        is_causal=True,
        rotary=RotaryTraits(float(config.real("rope_theta", default=10000.0)), scaling=scaling),
    )


LLAMA_META = Family(
    *("llama-meta", _block, _rest, _head, _traits),
    places=(Place("layers.{layer}.attention"),),
    roots=("",),
    known_by=("dim", "n_heads", "n_layers"),
)
"""Where a file is one of several, each has a part of every tensor: they are not put together here.
"""
