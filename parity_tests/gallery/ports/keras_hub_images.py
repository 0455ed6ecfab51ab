"""KerasHub's image models, converted from a folder of transformers with random weights."""

from functools import partial
from typing import Any

import numpy as np
import torch

from gallery.by_value import layout_by_value
from gallery.port import Port, Subject
from gallery.ports.keras_hub_text import converted
from jax_attn.parity import Pair

SIDE, PATCH = 24, 8
_SIZES = {
    "image_size": SIDE,
    "patch_size": PATCH,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
_DINO = {**_SIZES, "mlp_ratio": 2, "layerscale_value": 0.5}
_SWIN = {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4]}
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "ViT": ("vit", _SIZES),
    "ViT, layer_norm_eps 1e-6": ("vit", {**_SIZES, "layer_norm_eps": 1e-6}),
    "ViT, no qkv_bias": ("vit", {**_SIZES, "qkv_bias": False}),
    "DeiT": ("deit", _SIZES),
    "DINOv2": ("dinov2", {**_DINO, "apply_layernorm": True}),
    "DINOv2 with registers": ("dinov2_with_registers", {**_DINO, "num_register_tokens": 2}),
    "DINOv3": ("dinov3_vit", {**_SIZES, "num_register_tokens": 2, "layerscale_value": 0.5}),
    "Swin": ("swin", {**_SWIN, "window_size": 4}),
}


def _their_states(module: Any, pixel_values: Any) -> Any:
    return module(pixel_values).last_hidden_state


def _our_states(backbone: Any, pixel_values: Any) -> Any:
    """Call a backbone, whose images are (B, height, width, channels)."""
    return backbone(pixel_values.transpose(0, 2, 3, 1))


def _subject(model_type: str, fields: dict[str, Any], dtype: str) -> Subject:
    import transformers
    from small_transformers import randomized

    config = transformers.AutoConfig.for_model(model_type, **fields)
    config._attn_implementation = "eager"
    # The converters of ViT and DeiT read the names of a published file, which has a classifier.
    with_head = model_type in ("vit", "deit")
    auto = transformers.AutoModelForImageClassification if with_head else transformers.AutoModel
    whole = auto.from_config(config).eval()
    randomized(whole)
    port = converted(whole, dtype)
    model = whole.base_model.to(getattr(torch, dtype))
    side = fields["image_size"]
    images = np.random.default_rng(0).standard_normal((2, 3, side, side)).astype(np.float32)
    pair = Pair(
        model,
        port,
        {"pixel_values": images},
        layout=layout_by_value(model, port),
        reference_call=_their_states,
        port_call=_our_states,
    )
    return Subject(pair)


PORTS = tuple(
    Port(f"keras-hub {name}", "keras-hub", partial(_subject, *row)) for name, row in ROWS.items()
)
