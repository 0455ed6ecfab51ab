"""Rotary positions as configs name them, `rope_scaling` of old and `rope_parameters` of now."""

from collections.abc import Mapping
from typing import Any

from jax_attn.transfer.families.config import flag, number, real, refuse
from jax_attn.transfer.families.family import Config, RotaryTraits
from jax_attn.transfer.layout import Layout
from jax_attn.transfer.rows import ignored

FREQUENCIES = Layout(ignored("rotary_emb.inv_freq", "frequencies, worked out from the config"))
"""What old files hold of them."""


def rotary(config: Config, head_dim: int, *, part: float | None = None) -> RotaryTraits:
    """What a config says of rotary positions; transformers' defaults where it says nothing.

    part: how much of a head turns where the config does not say; None where all of it does,
    whatever the config says. Raises TransferError for a rope_type that is not known here, and for
    a part that is no whole number of pairs.
    """
    name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    rope = config.get(name) or {}
    if not isinstance(rope, Mapping):
        raise refuse(name, rope, "a JSON object")
    named = {**config, **rope}
    base = float(real(named, "rope_theta", "rotary_emb_base", default=10000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in tuple(_SCALINGS):  # a list, which no dict can look up, is not either
        raise refuse("rope_type", kind, f"one of {', '.join(_SCALINGS)}")
    dim = None if part is None else _turning(named, head_dim, part)
    return RotaryTraits(base, dim, scaling=_SCALINGS[kind](rope, config))


def _turning(named: Mapping[str, Any], head_dim: int, part: float) -> int | None:
    names = "partial_rotary_factor", "rotary_pct"
    part = real(named, *names, default=part)
    dim = int(head_dim * part)
    if not 2 <= dim <= head_dim or dim % 2:
        raise refuse(" or ".join(names), part, f"pairs of the {head_dim} features of a head")
    return None if dim == head_dim else dim


def _linear(rope: Mapping[str, Any], config: Config):
    return "Linear", {"factor": real(rope, "factor")}


def _dynamic(rope: Mapping[str, Any], config: Config):
    # transformers takes the config's length for the original one.
    length = number(config, "max_position_embeddings")
    return "DynamicNTK", {"factor": real(rope, "factor"), "original_length": length}


def _llama3(rope: Mapping[str, Any], config: Config):
    fields = {name: real(rope, name) for name in ("factor", "low_freq_factor", "high_freq_factor")}
    return "Llama3", fields | {"original_length": _original(rope, config)}


def _yarn(rope: Mapping[str, Any], config: Config):
    original = _original(rope, config)
    factor = real(rope, "factor", default=None)
    if factor is None:
        factor = number(config, "max_position_embeddings") / original
    optional = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")
    fields = {name: real(rope, name) for name in optional if rope.get(name)}
    if (truncate := flag(rope, "truncate", default=None)) is not None:
        fields["truncate"] = truncate
    return "Yarn", {"factor": factor, "original_length": original, **fields}


def _original(rope: Mapping[str, Any], config: Config) -> int:
    name = "original_max_position_embeddings"
    inside = number(rope, name, default=None)
    # Beside the scaling's own fields it goes before them: so transformers reads it.
    return number(config, name, default=inside) or number(config, "max_position_embeddings")


_SCALINGS = {
    "default": lambda rope, config: None,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
}
