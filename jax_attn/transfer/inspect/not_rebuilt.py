"""What a model does in its attention beyond four projections and a softmax.

`LACKS` lists what a rebuild from the projections alone has no place for, and how configs and keys
name it. Needs no framework.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jax_attn.transfer.families.config import Config, is_positive


@dataclass(frozen=True)
class Lack:
    """Something that four projections and a softmax do not do, and what gives it away.

    keys: of the config, unless their value is null, false, 0 or empty. positions: values of its
    position_embedding_type. families: model types that always have it. beside: a pattern of keys
    beside the projections. other: whatever else in the config names it, given H; "" for nothing.
    Several words stand in one string.
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
        """Everything that gives it away."""
        yield from (f"{key} = {config[key]!r}" for key in self.keys.split() if config.get(key))
        for key, values in (
            ("position_embedding_type", self.positions),
            ("model_type", self.families),
        ):
            if config.get(key) in values.split():
                yield f"{key} = {config[key]!r}"
        if sign := self.other(config, head_dim):
            yield sign
        yield from (f"{key} beside it" for key in beside if re.search(self.beside, key))


def _window(config: Config, head_dim: int | None) -> str:
    """The window, unless it is switched off or no layer uses it."""
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
    """A scale other than 1/√H."""
    for key, scale in _SCALES.items():
        value = config.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            continue
        usual = None if head_dim is None or not is_positive(value) else head_dim**-0.5
        if usual is None or not math.isclose(scale(value), usual, rel_tol=1e-6):
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
    Lack("clipped projections", keys="clip_qkv"),
    Lack("attention sinks", beside=r"(^|\.)sinks$"),
    Lack("a learnt key and value", beside=r"(^|\.)bias_[kv]$"),
    Lack("a bias of its own name", beside=r"(^|\.)[qkv]_bias$"),
    Lack("low-rank adapters", beside=r"lora_"),
)


def lacking(config: Config, beside: Sequence[str], head_dim: int | None = None) -> tuple[str, ...]:
    """What the model does in a block and the rebuild does not, and what gives it away.

    config: as `seen_from` the block. beside: keys under its prefix. head_dim: H, where known.
    """
    signs = ((lack.what, [*lack.named_by(config, beside, head_dim)]) for lack in LACKS)
    return tuple(f"the rebuild lacks {what}: {', '.join(by)}" for what, by in signs if by)
