"""Heads of a block, and features that a rebuild does not support, from a checkpoint's config.

A block found by its spelling belongs to no known family, so its config may name heads in any way.
Needs no framework. Letters: N and K query and key/value heads, H head_dim.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jax_attn.families.config import (
    HEAD_DIM,
    NUM_HEADS,
    NUM_KV_HEADS,
    Config,
    Reading,
    StandIn,
    is_positive,
)
from jax_attn.families.family import type_of
from jax_attn.porting.inspect.discover import AttentionBlock, ProjectionRows
from jax_attn.transfer.problems import Problem, TransferError
from jax_attn.transfer.table.spellings import OTHERWISE_PACKED
from jax_attn.transfer.table.steps import Sizes

# Part of a config -> the modules that it describes, if their names differ.
_MODULES = {"text": ("text", "language"), "vision": ("vision", "visual")}

KEYS_WITHOUT_BIAS = ("whisper", "whisper_encoder", "qwen2_audio", "qwen2_audio_encoder", "voxtral")
"""Model types whose keys have no bias although queries and values have one."""


class UnknownHeadsError(ValueError):
    """Neither the config nor the caller says how many query heads there are."""


def typed(config: Config) -> Config:
    """Return the config with its model_type, if it lacks it and names a class of a known one.

    Known are those of which this package knows attention that is not as usual.
    """
    kinds = {kind for lack in LACKS for kind in lack.families.split()}
    kind = type_of(config, sorted(kinds | {*KEYS_WITHOUT_BIAS, *OTHERWISE_PACKED}))
    return config if kind is None else {**config, "model_type": kind}


def seen_from(config: Config, prefix: str) -> Config:
    """Return the config as it applies to the block at `prefix`.

    A part (vision_config, decoder, attn_config, decoder_attention_heads) applies if the prefix
    contains a module of that name; a part that names heads replaces the whole config.
    """
    modules = prefix.split(".")

    def concerns(scope: str) -> bool:
        names = _MODULES.get(scope, (scope,))
        return any(m == name or m.startswith(f"{name}_") for m in modules for name in names)

    seen = dict(config)
    for key, value in config.items():
        if key.endswith("_attention_heads") and concerns(key.removesuffix("_attention_heads")):
            seen["num_attention_heads"] = value
        elif isinstance(value, dict) and concerns(key.removesuffix("_config")):
            seen = dict(value) if any(name in value for name in NUM_HEADS) else seen | value
    return seen


def head_counts(
    block: AttentionBlock, config: Config, num_heads: int | None, num_kv_heads: int | None
) -> tuple[Sizes, float | None]:
    """Return N, K and H of a block, from its shapes, the config and the caller; and its softcap.

    config: as `seen_from` the block. num_heads, num_kv_heads: the caller's. Raises
    UnknownHeadsError; TransferError with everything that disagrees.
    """
    read = Reading(config)
    N = _agreed(read, NUM_HEADS, "--num-heads", num_heads)
    K = _agreed(read, NUM_KV_HEADS, "--num-kv-heads", num_kv_heads)
    H = _agreed(read, HEAD_DIM)
    softcap = read.real("attn_logit_softcapping", default=None)
    problems = [*read.problems]
    if not problems and N is None:
        raise UnknownHeadsError(
            f"{block.rows['q.weight'].key}: num_heads cannot be inferred from shapes: expected "
            f"one of {', '.join(NUM_HEADS)} in {read.file} next to the checkpoint, or --num-heads"
        )
    if not problems and N is not None:
        problems += _misfits(block, N, K, H)
    if problems or N is None:
        raise TransferError(f"heads of {block.name}", problems)
    head_dim = block.rows["q.weight"].length // N.value
    sizes = Sizes(N.value, block.rows["k.weight"].length // head_dim, head_dim)
    return sizes, None if softcap is None else float(softcap)


class _Named(NamedTuple):
    """A number and its source."""

    source: str
    value: int

    def __str__(self) -> str:
        return f"{self.source} = {self.value}"


def _agreed(
    read: Reading, names: Sequence[str], option: str = "", chosen: int | None = None
) -> _Named | None:
    """Return the number on which the option and all `names` of the config agree; None if absent."""
    numbers = [] if chosen is None else [_Named(option, chosen)]
    for name in names:
        value = read.number(name, default=None)
        if value is not None and not isinstance(value, StandIn):
            numbers.append(_Named(f"{read.file} {name}", value))
    if len({number.value for number in numbers}) > 1:
        text = f"expected one number from all sources, got {', '.join(map(str, numbers))}"
        read.problems[Problem("ambiguous", numbers[0].source, text)] = None
    return numbers[0] if numbers else None


def _misfits(
    block: AttentionBlock, N: _Named, K: _Named | None, H: _Named | None
) -> Iterator[Problem]:
    """Report rows that are not a whole number of heads, or not the expected number."""
    query, key = block.rows["q.weight"], block.rows["k.weight"]
    if query.length % N.value:
        yield _misfit(query, f"a multiple of {N} query rows")
        return
    head_dim = query.length // N.value
    if H is not None and H.value != head_dim:
        yield _misfit(query, f"{N.value * H.value} query rows for {N} and {H}")
    if key.length % head_dim:
        yield _misfit(key, f"a multiple of head_dim = {head_dim} key rows ({N})")
        return
    kv_heads = key.length // head_dim
    if K is not None and K.value != kv_heads:
        yield _misfit(key, f"{K.value * head_dim} key rows for {K} of head_dim = {head_dim}")
    if N.value % kv_heads:
        yield _misfit(key, f"key/value heads that divide {N}, of head_dim = {head_dim}")


def _misfit(rows: ProjectionRows, expected: str) -> Problem:
    return Problem("wrong shape", rows.key, f"expected {expected}, got {rows.length} rows")


# --- unsupported by a rebuild -------------------------------------------------------------------


@dataclass(frozen=True)
class Lack:
    """A feature that four projections and a softmax do not have, and its signs.

    keys: config keys, unless their value is null, false, 0 or empty. positions: values of
    position_embedding_type. families: model types that always have it. beside: a pattern of keys
    under the block's prefix. other: another sign in the config, given H; "" if there is none.
    Strings hold several words.
    """

    what: str
    keys: str = ""
    positions: str = ""
    families: str = ""
    beside: str = r"(?!)"
    other: Callable[[Config, int | None], str] = lambda config, head_dim: ""

    def named_by(
        self, config: Config, beside: Sequence[str], head_dim: int | None
    ) -> Iterator[str]:
        """Yield every sign of the feature."""
        yield from (f"{key} = {config[key]!r}" for key in self.keys.split() if config.get(key))
        known = {"position_embedding_type": self.positions, "model_type": self.families}
        for key, values in known.items():
            if config.get(key) in values.split():
                yield f"{key} = {config[key]!r}"
        if sign := self.other(config, head_dim):
            yield sign
        yield from (f"{key} next to it" for key in beside if re.search(self.beside, key))


def _window(config: Config, head_dim: int | None) -> str:
    """Return the sign of a window, unless it is switched off or no layer uses it, or ""."""
    kinds = config.get("layer_types")
    unused = isinstance(kinds, list) and kinds and all(kind == "full_attention" for kind in kinds)
    used = config.get("use_sliding_window", True) and not unused
    width = config.get("sliding_window")
    return f"sliding_window = {width!r}" if width and used else ""


_SCALES: dict[str, Callable[[Any], Any]] = {
    "query_pre_attn_scalar": lambda value: value**-0.5,
    "attention_multiplier": lambda value: value,
    "softmax_scale": lambda value: value,
}


def _scale(config: Config, head_dim: int | None) -> str:
    """Return the sign of a scale other than 1/√H, or ""."""
    for key, scale in _SCALES.items():
        value = config.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            continue
        usual = None if head_dim is None or not is_positive(value) else head_dim**-0.5
        if usual is None or not math.isclose(scale(value), usual, rel_tol=1e-6):
            return f"{key} = {value!r}"
    off = config.get("scale_attn_weights") is False
    return "scale_attn_weights = False" if off else ""


# Features that a rebuild from four projections does not support, and their signs.
LACKS = (
    Lack(
        "rotary positions",
        keys="rope_theta rope_scaling rope_parameters rotary_dim rotary_pct rotary_emb_base "
        "rotary_emb_fraction partial_rotary_factor global_rope_theta",
        positions="rotary rope",
        families="llama llama4 mistral mixtral qwen2 qwen2_moe qwen3 qwen3_moe gemma gemma2 gemma3 "
        "gemma3_text phi phi3 gpt_neox gptj codegen cohere cohere2 olmo olmo2 stablelm starcoder2 "
        "persimmon granite roformer nomic_bert modernbert gpt_oss chatglm glm deepseek_v2 "
        "deepseek_v3 smollm3",
        beside=r"rotary|inv_freq",
    ),
    Lack(
        "a relative position bias",
        keys="relative_attention relative_attention_num_buckets use_relative_position_bias "
        "use_shared_relative_position_bias use_rel_pos",
        positions="relative_key relative_key_query relative",
        families="t5 mt5 umt5 longt5 switch_transformers deberta deberta-v2 xlnet mpnet beit swin "
        "swinv2 transfo-xl wavlm wav2vec2-conformer",
        beside=r"relative|distance_embedding|rel_pos|pos_(key|query)_proj|pos_bias|linear_pos",
    ),
    Lack("ALiBi", keys="alibi use_alibi", positions="alibi", families="bloom mpt"),
    Lack(
        "a window",
        keys="attention_window window_size local_attention",
        families="longformer gpt_neo swin swinv2",
        other=_window,
    ),
    Lack(
        "a norm of queries and keys",
        keys="use_qk_norm qk_norm qk_layernorm qk_ln",
        beside=r"(^|[._])(q|k|query|key)_?(layer_?)?(norm|ln)|norm_[qk]\b|(^|\.)ln_[qk]\b",
    ),
    Lack(
        "a scale of its own",
        keys="scale_attn_by_inverse_layer_idx",
        families="t5 mt5 umt5 longt5 switch_transformers gpt_neo",
        beside=r"logit_scale",
        other=_scale,
    ),
    Lack(
        "an approximation of the softmax",
        keys="num_landmarks",
        families="nystromformer yoso mra reformer big_bird bigbird_pegasus performer",
    ),
    Lack("clipped projections", keys="clip_qkv"),
    Lack("attention sinks", beside=r"(^|\.)sinks$"),
    Lack("a learned key and value", beside=r"(^|\.)bias_[kv]$"),
    Lack("a bias of its own name", beside=r"(^|\.)[qkv]_bias$"),
    Lack("low-rank adapters", beside=r"lora_"),
)


def lacking(config: Config, beside: Sequence[str], head_dim: int | None = None) -> tuple[str, ...]:
    """Return what the model does in a block and the rebuild does not, with its signs.

    config: as `seen_from` the block. beside: keys under its prefix. head_dim: H, if known.
    """
    signs = ((lack.what, [*lack.named_by(config, beside, head_dim)]) for lack in LACKS)
    return tuple(f"the rebuild lacks {what}: {', '.join(by)}" for what, by in signs if by)
