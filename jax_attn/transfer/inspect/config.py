"""What the config.json beside a checkpoint says of its attention: heads, and what else it does.

`LACKS` lists what a rebuild from four projections has no place for. Needs no framework.

Letters: N and K query and key/value heads, H head_dim.
"""

import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jax_attn.transfer.files.safetensors_file import unique
from jax_attn.transfer.inspect.discover import Block, Part
from jax_attn.transfer.port.files import CONFIGS
from jax_attn.transfer.problems import Problem, TransferError

Config = Mapping[str, Any]

NAME = "config.json"
_HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "n_kv_heads")
_HEAD_DIMS = ("head_dim", "d_kv", "attention_head_size", "kv_channels")
_SOFTCAP = "attn_logit_softcapping"
_LARGEST = sys.float_info.max
"""JSON's integers have no end."""
# Part of a config -> modules that it is about, where they are called otherwise.
_MODULES = {"text": ("text", "language"), "vision": ("vision", "visual")}


class Sizes(NamedTuple):
    """N, K and H, and the softcap, None for none."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    softcap: float | None


class UnknownHeadsError(ValueError):
    """Neither the config nor the caller says how many query heads there are."""


def read_config(path: Path) -> Config | None:
    """The config.json in a checkpoint's folder, else Meta's params.json; None where neither is.

    path: the checkpoint, a file or a folder. Raises TransferError where it is no JSON object.
    """
    folder = path if path.is_dir() else path.parent
    file = next((folder / name for name in CONFIGS if (folder / name).is_file()), None)
    if file is None:
        return None
    try:
        config = json.loads(file.read_text("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError, OSError) as error:
        raise _bad_config(file, f"expected JSON: {error}") from error
    if not isinstance(config, dict):
        raise _bad_config(file, f"expected a JSON object, got {type(config).__name__}")
    return config


def seen_from(config: Config, prefix: str) -> Config:
    """The config as it concerns the block at `prefix`.

    A part of its own (vision_config, decoder, attn_config, decoder_attention_heads) counts where
    the prefix runs through a module of that name; one that names heads counts alone.
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
            seen = dict(value) if any(name in value for name in _HEADS) else seen | value
    return seen


def sizes(block: Block, config: Config, num_heads: int | None, num_kv_heads: int | None) -> Sizes:
    """N, K and H of a block, from its shapes and whoever names its heads.

    config: as `seen_from` the block. num_heads, num_kv_heads: as the caller gives them. Raises
    UnknownHeadsError; TransferError with everything that disagrees.
    """
    problems: list[Problem] = []
    N = _agreed("--num-heads", num_heads, config, _HEADS, problems)
    K = _agreed("--num-kv-heads", num_kv_heads, config, _KV_HEADS, problems)
    H = _agreed("", None, config, _HEAD_DIMS, problems)
    softcap = _softcap(config, problems)
    if not problems and N is None:
        raise UnknownHeadsError(
            f"{block.parts['q.weight'].key}: how many heads its rows are is not known: expected "
            f"one of {', '.join(_HEADS)} in {NAME} beside the checkpoint, or --num-heads"
        )
    if not problems:
        problems += _misfits(block, N, K, H)
    if problems:
        raise TransferError(f"heads of {block.name}", problems)
    head_dim = block.parts["q.weight"].rows // N.value
    return Sizes(N.value, block.parts["k.weight"].rows // head_dim, head_dim, softcap)


class _Said(NamedTuple):
    """A number and who says so."""

    source: str
    value: int

    def __str__(self) -> str:
        return f"{self.source} = {self.value}"


def _agreed(
    option: str, given: int | None, config: Config, names: Sequence[str], problems: list[Problem]
) -> _Said | None:
    """What all who name a number agree on; None where nobody does."""
    said = [_Said(option, given)] if given is not None else []
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            said.append(_Said(f"{NAME} {name}", value))
        else:
            text = f"expected a whole number above 0, got {value!r}"
            problems.append(Problem("file", f"{NAME} {name}", text))
    if len({s.value for s in said}) > 1:
        text = f"expected one number from all who name it, got {', '.join(map(str, said))}"
        problems.append(Problem("ambiguous", said[0].source, text))
    return said[0] if said else None


def _softcap(config: Config, problems: list[Problem]) -> float | None:
    value = config.get(_SOFTCAP)
    if value is None:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= _LARGEST:
        return float(value)
    text = f"expected a number above 0, or null, got {value!r}"
    problems.append(Problem("file", f"{NAME} {_SOFTCAP}", text))
    return None


def _misfits(block: Block, N: _Said, K: _Said | None, H: _Said | None) -> Iterator[Problem]:
    """Rows that are no whole number of heads, or not as many as is said."""
    query, key = block.parts["q.weight"], block.parts["k.weight"]
    if query.rows % N.value:
        yield _misfit(query, f"a multiple of {N} query rows")
        return
    head_dim = query.rows // N.value
    if H is not None and H.value != head_dim:
        yield _misfit(query, f"{N.value * H.value} query rows for {N} and {H}")
    if key.rows % head_dim:
        yield _misfit(key, f"a multiple of head_dim = {head_dim} key rows ({N})")
        return
    kv_heads = key.rows // head_dim
    if K is not None and K.value != kv_heads:
        yield _misfit(key, f"{K.value * head_dim} key rows for {K} of head_dim = {head_dim}")
    if N.value % kv_heads:
        yield _misfit(key, f"key/value heads that divide {N}, of head_dim = {head_dim}")


def _misfit(part: Part, expected: str) -> Problem:
    return Problem("wrong shape", part.key, f"expected {expected}, got {part.rows} rows")


def _bad_config(file: Path, reason: str) -> TransferError:
    return TransferError("reading the config", [Problem("file", str(file), reason)])


# --- what the rebuild lacks -----------------------------------------------------------------------


@dataclass(frozen=True)
class Lack:
    """Something that four projections and a softmax do not do.

    keys: of the config; named by any value but none, false, 0 or empty. positions: values of
    its position_embedding_type. families: model types that have it without a word. beside:
    a pattern of keys beside the projections. says: what else in the config names it, given H.
    Several words stand in one string.
    """

    what: str
    keys: str = ""
    positions: str = ""
    families: str = ""
    beside: str = r"(?!)"
    says: Callable[[Config, int | None], str] = lambda config, head_dim: ""

    def named_by(
        self, config: Config, beside: Sequence[str], head_dim: int | None
    ) -> Iterator[str]:
        """Everything that names it."""
        yield from (f"{key} = {config[key]!r}" for key in self.keys.split() if config.get(key))
        for key, values in (
            ("position_embedding_type", self.positions),
            ("model_type", self.families),
        ):
            if config.get(key) in values.split():
                yield f"{key} = {config[key]!r}"
        if said := self.says(config, head_dim):
            yield said
        yield from (f"{key} beside it" for key in beside if re.search(self.beside, key))


def _window(config: Config, head_dim: int | None) -> str:
    """A window that is switched off, or that no layer uses, is none."""
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
    """A scale that is 1/√H all the same is none of its own."""
    for key, scale in _SCALES.items():
        value = config.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            continue
        known = head_dim is not None and value <= _LARGEST
        if not known or not math.isclose(scale(value), head_dim**-0.5, rel_tol=1e-6):
            return f"{key} = {value!r}"
    off = config.get("scale_attn_weights") is False
    return "scale_attn_weights = False" if off else ""


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
        says=_window,
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
        says=_scale,
    ),
    Lack("clipped projections", keys="clip_qkv"),
    Lack("attention sinks", beside=r"(^|\.)sinks$"),
    Lack("a learnt key and value", beside=r"(^|\.)bias_[kv]$"),
    Lack("a bias of its own name", beside=r"(^|\.)[qkv]_bias$"),
    Lack("low-rank adapters", beside=r"lora_"),
)


def lacking(config: Config, beside: Sequence[str], head_dim: int | None = None) -> tuple[str, ...]:
    """What the model does in a block and the rebuild does not, and what says so.

    config: as `seen_from` the block. beside: keys under its prefix. head_dim: H, where known.
    """
    found = ((lack.what, [*lack.named_by(config, beside, head_dim)]) for lack in LACKS)
    return tuple(f"the rebuild lacks {what}: {', '.join(by)}" for what, by in found if by)
