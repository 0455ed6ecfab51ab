"""The epsilon of a Llama config does not reach KerasHub's layers."""

import os

os.environ["KERAS_BACKEND"] = "jax"
import keras_hub
import numpy as np
from keras_hub.src.utils.transformers.convert_llama3 import convert_backbone_config
from transformers import LlamaConfig

sizes = {"vocab_size": 9, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
config = LlamaConfig(**sizes, num_attention_heads=2, rms_norm_eps=1e-5)
backbone = keras_hub.models.Llama3Backbone(**convert_backbone_config(config.to_dict()))
norm = backbone.get_layer("sequence_output_layernorm")
x = np.full((1, 1, 8), 0.01, np.float32)
print("rms_norm_eps:", config.rms_norm_eps, "used:", norm.epsilon)
print("normalized 0.01:", np.asarray(norm(x))[0, 0, 0], "expected:", 0.01 / np.sqrt(1e-4 + 1e-5))
