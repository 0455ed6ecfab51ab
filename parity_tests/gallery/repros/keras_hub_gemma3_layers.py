"""KerasHub's Gemma 3 makes every sixth layer a global one, whatever layer_types says."""

import os

os.environ["KERAS_BACKEND"] = "jax"
import keras_hub
from keras_hub.src.utils.transformers.convert_gemma3 import convert_backbone_config
from transformers import Gemma3TextConfig

sizes = {"vocab_size": 9, "hidden_size": 8, "intermediate_size": 8, "head_dim": 4}
kinds = ["sliding_attention", "full_attention"]
config = Gemma3TextConfig(**sizes, num_hidden_layers=2, num_attention_heads=2, layer_types=kinds)
backbone = keras_hub.models.Gemma3Backbone(**convert_backbone_config(config.to_dict()))
for i, kind in enumerate(kinds):
    attention = backbone.get_layer(f"decoder_block_{i}").attention
    print(kind, "uses a window:", attention.use_sliding_window_attention)
