"""Small models of transformers by their type alone: a config cut down by the names of its fields.

Where a model of the cut config does not run, the widths are kept and only the layers and the
vocabulary are cut. Inputs follow the names of forward's parameters, and the first set that the
model runs on, with finite outputs, is taken.
"""

import inspect
import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from transformers.models.auto.modeling_auto import MODEL_MAPPING

B, T, S = 2, 11, 7
VOCABULARY, FIRST_SPECIAL = 128, 80
LARGEST = 50_000_000
"""Parameters of a model that still counts as small."""

# The first pattern that matches a field's name says what an integer in it is cut to.
LAYERS = (
    (r"num_feat_extract_layers$", 7),
    (r"(^|_)(num_|n_)?(\w+_)?layers?$|^(depth|num_blocks|resampler_depth)$", 2),
    (r"vocab_size\w*$", VOCABULARY),
)
SIZES = (
    *LAYERS,
    (r"qk_head_dim$", 16),
    (r"(head_dim|d_kv|d_head|dim_head|head_size|d_state|state_size)$", 8),
    (r"(key_value_heads|kv_heads|key_heads)$", 2),
    (r"(heads?|attn_heads)$", 4),
    (r"experts_per_tok(en)?$|^(top_k|moe_k|moe_topk)$", 2),
    (r"(num_\w*experts|n_routed_experts|num_experts)$", 4),
    (r"^(n_group|topk_group|num_expert_group\w*)$", 1),
    (r"(lora_rank|low_rank_dim|dt_rank|time_step_rank|laurel_rank)$", 8),
    (r"(position_embeddings|n_positions|positions|max_seq_len|n_ctx)$", 64),
    (r"(image_size|resolution|crop_size)$", 32),
    (r"patch_size$", 8),
    (r"(sliding_window\w*|local_attention|attention_window)$", 4),
    (
        r"(intermediate_size\w*|ffn_dim|d_ff|n_inner|mlp_dim|ffn_hidden_size|inner_dim|feedforward_dim)$",
        48,
    ),
    (
        r"(hidden_size\w*|d_model|n_embd|embed_dim|embedding_size|embedding_dim|hidden_dim|^dim"
        r"|emb_dim|projection_dim|projection_size|output_dim|out_channels|width|channels"
        r"|decoder_dim|bottleneck\w*size|proj_dim)$",
        32,
    ),
    (r"(num_mel_bins|feature_size)$", 16),
    (r"num_queries$|num_query_tokens$", 5),
    (r"num_frames$", 4),
    (r"(context_size|rotary_dim|^n_groups|n_groups)$", 8),
)
# Some models have heads of 64 whatever their config says.
WIDE = tuple((pattern, {32: 128, 48: 128, 4: 2}.get(size, size)) for pattern, size in SIZES)
CUTS = {"sizes": SIZES, "sizes, wider": WIDE, "layers": LAYERS}
STAGES = ("out_features", "out_indices", "stage_names", "_out_features", "_out_indices")
"""What follows from the number of layers."""
MISSING = {"vocab_size": VOCABULARY, "prediction_length": 8, "pad_token_id": 0}
"""Fields that a user has to give."""
NESTED = ("text_config", "attn_config", "ffn_config", "rope_parameters", "rope_scaling")
WIDTHS = r"(hidden_sizes|embed_dims?|dims|channels|conv_dim|tdnn_dim|widths?)$"
TOKENS = r"token(_id|_index)$"


class Small(NamedTuple):
    """A model, inputs by name on which it runs, and how its config was cut."""

    model: torch.nn.Module
    inputs: dict[str, torch.Tensor]
    cut: str


class NotBuiltError(Exception):
    """No small model of a type runs; the message says why."""


def types() -> dict[str, Any]:
    """Return the class of the config of each model type that has a model."""
    return dict(sorted((config.model_type, config) for config in MODEL_MAPPING))


def cut_config(fields: Mapping[str, Any], sizes: Any, tokens: dict[int, int]) -> dict[str, Any]:
    """Return the fields of a config with smaller sizes, those of the configs in it too."""
    made = {
        name: _cut(name, value, sizes, tokens)
        for name, value in fields.items()
        if name not in STAGES
    }
    made |= {name: value for name, value in MISSING.items() if name in made and made[name] is None}
    if "use_cache" in made:
        made["use_cache"] = False
    if sizes is not LAYERS:
        for prefix, head in (("", "head_dim"), ("mamba_", "mamba_d_head")):
            heads = next((n for n in (f"{prefix}num_heads", f"{prefix}n_heads") if n in made), "")
            if f"{prefix}expand" in made and heads and type(made.get(head)) is int:
                made[heads] = made["hidden_size"] * made[f"{prefix}expand"] // made[head]
        for value in made.values():
            if isinstance(value, dict) and "mrope_section" in value:
                half = made.get("head_dim") or 8
                value |= {"mrope_section": [half // 4, half // 8, half // 8]}
                value |= {"partial_rotary_factor": 1.0}
    return _with_few_layers(fields, made)


def _cut(name: str, value: Any, sizes: Any, tokens: dict[int, int]) -> Any:
    if isinstance(value, dict) and ("model_type" in value or name in NESTED):
        return cut_config(value, sizes, tokens)
    if isinstance(value, dict) and name == "per_layer_config":
        return {i: _cut("text_config", each, sizes, tokens) for i, each in value.items()}
    if isinstance(value, (list, tuple)) and value and all(type(each) is int for each in value):
        return type(value)(_cut_list(name, value, sizes))
    if type(value) is not int:
        return value
    if re.search(TOKENS, name):
        if value < FIRST_SPECIAL:
            return value
        return tokens.setdefault(value, FIRST_SPECIAL + len(tokens))
    least = next((size for pattern, size in sizes if re.search(pattern, name)), value)
    return min(value, least)


def _cut_list(name: str, values: Any, sizes: Any) -> list[int]:
    if name == "depths":
        return [min(value, 2) for value in values]
    if sizes is LAYERS:
        return list(values)
    if len({*values}) > 1 and re.search(WIDTHS, name):
        is_doubled = all(2 * one == other for one, other in itertools.pairwise(values))
        return [16 * 2**i if is_doubled else 16 * (i + 1) for i in range(len(values))]
    if len({*values}) > 1 and re.search(r"heads$", name):
        is_doubled = all(2 * one == other for one, other in itertools.pairwise(values))
        return [2**i if is_doubled else i + 1 for i in range(len(values))]
    return [_cut(name, value, sizes, {}) for value in values]


def _with_few_layers(fields: Mapping[str, Any], made: dict[str, Any]) -> dict[str, Any]:
    """Keep layers of every kind where lists say the kind of each."""
    name = next((key for key in ("num_hidden_layers", "n_layer", "num_layers") if key in made), "")
    count = fields.get(name)
    if not isinstance(count, int):
        return made
    lists = {
        key: value
        for key, value in fields.items()
        if isinstance(value, (list, tuple)) and len(value) == count and key in made
    }
    lists = {key: value for key, value in lists.items() if "layer" in key or count > 6}
    own = fields.get("per_layer_config") or {}
    if not lists and not own:
        return made
    kept = {list(value).index(each) for value in lists.values() for each in value}
    positions = sorted({0, count - 1, *kept, *sorted(map(int, own))[:1]})[:6]
    for key in lists:
        made[key] = [made[key][i] for i in positions]
    if own:
        by_layer = {int(i): made["per_layer_config"][i] for i in own}
        made["per_layer_config"] = {
            n: by_layer[i] for n, i in enumerate(positions) if i in by_layer
        }
    return made | {name: len(positions)}


def randomized(model: torch.nn.Module) -> None:
    """Give every parameter and running statistic values that show in the outputs."""
    torch.manual_seed(0)
    with torch.no_grad():
        for value in model.parameters():
            if not value.is_floating_point():
                continue
            if value.ndim < 2 or value.std() < 1e-6:
                value.add_(0.2 * torch.randn_like(value))
            elif value.mean().abs() < value.std():
                fan_in = max(value[0].numel(), 1)
                value.copy_(torch.randn_like(value) * fan_in**-0.5)
        for name, value in model.named_buffers():
            if name.endswith("running_mean"):
                value.add_(0.2 * torch.randn_like(value))
            elif name.endswith("running_var"):
                value.mul_(0.5 + torch.rand_like(value))


def build(config_class: Any) -> Small:
    """Return a small model of a type, in eval mode, with inputs.

    Raises NotBuiltError.
    """
    reasons = []
    for cut, sizes in CUTS.items():
        try:
            model = _model(config_class, sizes)
        except NotBuiltError as error:
            reasons.append(f"{cut}: {error}")
            continue
        except Exception as error:  # whatever a config or a model says of sizes it does not take
            reasons.append(f"{cut}: {_first_line(error)}")
            continue
        randomized(model)
        tried = []
        for inputs in _inputs(model):
            try:
                with torch.no_grad():
                    result = model(**inputs)
            except Exception as error:
                tried.append(_first_line(error))
                continue
            tensors = [each for each in _tensors(result) if each.is_floating_point()]
            if tensors and all(bool(torch.isfinite(each).all()) for each in tensors):
                return Small(model, inputs, cut)
            tried.append("outputs are not finite" if tensors else "no output")
        reasons.append(f"{cut}: {tried[0] if tried else 'no inputs are known'}")
    raise NotBuiltError("; ".join(reasons))


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    # What a config's own check says follows the name of the check.
    line = lines[-1] if "validator" in lines[0] else lines[0]
    return f"{type(error).__name__}: {line.strip()[:150]}"


def _tensors(result: Any) -> list[torch.Tensor]:
    leaves = torch.utils._pytree.tree_leaves(result)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _model(config_class: Any, sizes: Any) -> torch.nn.Module:
    config = config_class(**cut_config(config_class().to_dict(), sizes, {}))
    of = MODEL_MAPPING[config_class]
    model_class = of[0] if isinstance(of, (list, tuple)) else of
    with torch.device("meta"):
        count = sum(each.numel() for each in model_class(config).parameters())
    if count > LARGEST:
        raise NotBuiltError(f"{count / 1e6:.0f} million parameters")
    torch.manual_seed(0)
    return model_class(config).float().eval()


# --- inputs ---------------------------------------------------------------------------------


def _found(config: Any, names: tuple[str, ...], default: Any) -> Any:
    """Return the first such field of a config, or of one in it, that has a value."""
    for name in names:
        if getattr(config, name, None) is not None:
            return getattr(config, name)
    for name in getattr(config, "sub_configs", {}):
        sub = getattr(config, name, None)
        if sub is not None and (found := _found(sub, names, None)) is not None:
            return found
    return default


def _choices(config: Any) -> dict[str, list[torch.Tensor]]:
    """Return what each input may be, by its name, the likeliest first."""

    def tokens(*shape: int) -> torch.Tensor:
        return torch.randint(3, FIRST_SPECIAL, shape)

    side = _found(config, ("image_size", "input_size", "img_size"), 64)
    height, width = side[:2] if isinstance(side, (list, tuple)) else (side, side)
    channels = _found(config, ("num_channels", "in_channels", "in_chans"), 3)
    if not isinstance(channels, int):
        channels = 3
    frames = _found(config, ("num_frames", "frames_per_clip"), 4)
    bins = _found(config, ("num_mel_bins", "feature_size", "input_feat_size", "input_dim"), 80)
    steps = _found(config, ("max_source_positions",), 20)
    steps = steps if isinstance(steps, int) else 20
    context = _found(config, ("context_length",), 32)
    series = _found(config, ("num_input_channels", "input_size"), 1)
    corners = torch.randint(0, 30, (B, T, 4)).sort().values
    sides = dict.fromkeys([(height, width), (64, 64), (128, 128), (224, 224)])
    images = [
        torch.randn(B, channels, *each) for each in sides if all(type(n) is int for n in each)
    ]
    videos = [torch.randn(B, frames, channels, *image.shape[2:]) for image in images]
    waves = [torch.randn(B, 1600), torch.randn(B, 1, 1600), torch.randn(B, 6400)]
    length = _found(config, ("max_length",), 64)
    return {
        "input_ids": [tokens(B, T)],
        "decoder_input_ids": [tokens(B, S)],
        "pixel_values": [*images, *videos],
        "pixel_values_videos": videos,
        "input_values": [*waves, torch.randn(B, length if type(length) is int else 64, bins)],
        "input_features": [
            torch.randn(B, bins, 2 * steps),
            torch.randn(B, 2 * steps, bins),
            torch.randn(B, 64, bins),
        ],
        "bbox": [corners],
        "attention_mask": [torch.ones(B, T, dtype=torch.int64)],
        "past_values": [torch.randn(B, context, series), torch.randn(B, context)],
    }


def _inputs(model: Any) -> Iterator[dict[str, torch.Tensor]]:
    """Yield sets of inputs: what forward requires and the main input, then all that is known."""
    parameters = inspect.signature(model.forward).parameters
    torch.manual_seed(1)
    choices = {name: of for name, of in _choices(model.config).items() if name in parameters}
    required = [
        name
        for name, each in parameters.items()
        if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD
    ]
    main = [getattr(model, "main_input_name", "")]
    seconds = ("decoder_input_ids", "attention_mask", "bbox", "pixel_values")
    sets = [
        [*required, *main, "decoder_input_ids", "bbox"],
        [*required, *main],
        *([*required, "input_ids", second] for second in seconds),
        *([*required, name] for name in choices),
        list(choices),
    ]
    seen = set()
    for names in sets:
        known = [name for name in choices if name in names]
        if not known or tuple(known) in seen or not {*required} <= {*choices}:
            continue
        seen.add(tuple(known))
        for values in itertools.islice(itertools.product(*(choices[n] for n in known)), 12):
            yield dict(zip(known, values, strict=True))
