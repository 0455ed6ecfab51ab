"""The biases of a Llama config with attention_bias=True have no place in KerasHub's model."""

import os

os.environ["KERAS_BACKEND"] = "jax"
import keras_hub
from keras_hub.src.utils.transformers.convert_llama3 import convert_backbone_config
from transformers import LlamaConfig

sizes = {"vocab_size": 9, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
config = LlamaConfig(**sizes, num_attention_heads=2, attention_bias=True)
backbone = keras_hub.models.Llama3Backbone(**convert_backbone_config(config.to_dict()))
print("attention_bias:", config.attention_bias)
print("biases of the model:", [v.path for v in backbone.variables if "bias" in v.path])
