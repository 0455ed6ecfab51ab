"""The window of a Qwen 2 config does not reach KerasHub's attention."""

import os

os.environ["KERAS_BACKEND"] = "jax"
import keras_hub
from keras_hub.src.utils.transformers.convert_qwen import convert_backbone_config
from transformers import Qwen2Config

sizes = {"vocab_size": 9, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2}
heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
window = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}
config = Qwen2Config(**sizes, **heads, **window)
backbone = keras_hub.models.QwenBackbone(**convert_backbone_config(config.to_dict()))
for i, kind in enumerate(config.layer_types):
    attention = backbone.get_layer(f"transformer_layer_{i}")._self_attention_layer
    print(kind, "uses a window:", attention.use_sliding_window_attention)
