"""The parts shared by transformers' decoders: norms, MLPs, heads and rotary positions."""

from typing import Any

from jax_attn.families.config import Reading
from jax_attn.families.traits import RotaryTraits
from jax_attn.transfer import LAYER_NORM, LINEAR, Layout, ignored, tied
from jax_attn.transfer.table.layouts import BIASLESS

Scaling = tuple[str, dict[str, Any]]
"""A scaling's name in `jax_attn.attention`, and its fields."""

FROM_CONFIG = "frequencies, which are computed from the config"
FREQUENCIES = Layout(ignored("rotary_emb.inv_freq", FROM_CONFIG))
"""Only old files contain these."""

TASKS = Layout(
    LINEAR.under("score", "classifier"),
    LINEAR.under("classifier", "token_classifier"),
    LINEAR.under("qa_outputs", "qa_outputs"),
)


def norms(norm: Layout = LAYER_NORM) -> Layout:
    """Return the table of a block's two norms."""
    return Layout(
        norm.under("input_layernorm", "attention_norm"),
        norm.under("post_attention_layernorm", "mlp_norm"),
    )


def mlp(dense: Layout = LINEAR) -> Layout:
    """Return the table of a two-layer MLP."""
    return Layout(
        dense.under("mlp.dense_h_to_4h", "mlp.up"), dense.under("mlp.dense_4h_to_h", "mlp.down")
    )


def heads(config: Reading, embedding: str, *, tied_by_default: bool = True) -> Layout:
    """Return the table of a language model's head, and of the heads for other tasks.

    embedding: the key of the weight that the language model's head shares if the config ties them.
    """
    if config.flag("tie_word_embeddings", default=tied_by_default):
        return Layout(tied("lm_head.weight", embedding), TASKS)
    return Layout(BIASLESS.under("lm_head", "lm_head"), TASKS)


def sizes(config: Reading) -> tuple[int, int, int]:
    """Return D, N and H; configs may set H independently, as head_dim."""
    D, N = config.number("hidden_size"), config.number("num_attention_heads")
    H = config.number("head_dim", default=None)
    return (D, N, H) if H else config.share("hidden_size", "num_attention_heads")


# --- rotary positions: `rope_scaling` in old configs, `rope_parameters` in new ones --------------


def rotary(
    config: Reading,
    head_dim: int,
    *,
    part: float | None = None,
    names: tuple[str, str] = ("rope_theta", "partial_rotary_factor"),
    base: float = 10000.0,
) -> RotaryTraits:
    """Return the rotary positions of a config, with transformers' defaults.

    part: the part of a head that is rotated if the config does not say; None if the whole head is,
    whatever the config says. names: the family's names for base and part in old configs, next to
    rope_scaling. base: the base if the config does not say. A config that several versions have
    written may say all of it in old and in new words, which must mean the same. Refuses an unknown
    rope_type, and a part that is not a whole number of pairs.
    """
    old, new = config.inside("rope_scaling"), config.inside("rope_parameters")
    said = [rope for rope in (old, new) if rope.config] or [new]
    first, *others = [_turning(rope, config, head_dim, part, names, base) for rope in said]
    if any(other != first for other in others):
        expected = f"the same as rope_scaling, which is {old.config!r}"
        config.refuse("rope_parameters", new.config, expected)
    return first


def _turning(
    rope: Reading,
    config: Reading,
    head_dim: int,
    part: float | None,
    names: tuple[str, str],
    base: float,
) -> RotaryTraits:
    """Return what one of the two objects says, with what stands beside it."""
    old_base, old_part = names
    base = _in_either("rope_theta", old_base, rope, config, base)
    dim = None
    if part is not None:
        part = _in_either("partial_rotary_factor", old_part, rope, config, part)
        dim = int(head_dim * part)
        if not 2 <= dim <= head_dim or dim % 2:
            expected = f"pairs of the {head_dim} features of a head"
            config.refuse(old_part, part, expected, head_dim, part)
    return RotaryTraits(
        float(base), None if dim == head_dim else dim, scaling=_scaling(rope, config)
    )


def _in_either(name: str, old_name: str, rope: Reading, config: Reading, default: float) -> float:
    """Return a number in rope_parameters or next to them; if it is in both, they must agree."""
    inside, beside = rope.real(name, default=None), config.real(old_name, default=None)
    if None not in (inside, beside) and inside != beside:
        config.refuse(old_name, beside, f"{inside!r}, as {name} in rope_parameters", inside, beside)
    return next((x for x in (inside, beside) if x is not None), default)


def _scaling(rope: Reading, config: Reading) -> Scaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in tuple(_SCALINGS):  # a dict cannot look up a list
        rope.refuse("rope_type", kind, f"one of {', '.join(_SCALINGS)}")
        return None
    return _SCALINGS[kind](rope, config)


def _dynamic(rope: Reading, config: Reading) -> Scaling:
    # transformers takes the config's length as the original one.
    length = config.number("max_position_embeddings")
    return "DynamicNTK", {"factor": rope.real("factor"), "original_length": length}


def _llama3(rope: Reading, config: Reading) -> Scaling:
    fields = {name: rope.real(name) for name in ("factor", "low_freq_factor", "high_freq_factor")}
    return "Llama3", fields | {"original_length": _original(rope, config)}


def _yarn(rope: Reading, config: Reading) -> Scaling:
    original = _original(rope, config)
    factor = rope.real("factor", default=None)
    if factor is None:
        factor = config.number("max_position_embeddings") / original
    optional = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")
    fields = {name: rope.real(name) for name in optional if rope.get(name)}
    if (truncate := rope.flag("truncate", default=None)) is not None:
        fields["truncate"] = truncate
    return "Yarn", {"factor": factor, "original_length": original, **fields}


def _original(rope: Reading, config: Reading) -> int:
    name = "original_max_position_embeddings"
    inside = rope.number(name, default=None)
    # A top-level value overrides the nested one, as in transformers.
    return config.number(name, default=inside) or config.number("max_position_embeddings")


_SCALINGS = {
    "default": lambda rope, config: None,
    "linear": lambda rope, config: ("Linear", {"factor": rope.real("factor")}),
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
}
