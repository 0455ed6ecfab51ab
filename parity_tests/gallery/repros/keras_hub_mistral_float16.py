"""KerasHub's converter of Mistral rounds every weight to float16."""

import os

os.environ["KERAS_BACKEND"] = "jax"
import keras_hub
import numpy as np
from keras_hub.src.utils.transformers import convert_mistral

sizes = {"vocabulary_size": 9, "num_layers": 0, "num_query_heads": 2, "num_key_value_heads": 2}
backbone = keras_hub.models.MistralBackbone(**sizes, hidden_dim=8, intermediate_dim=8)


class Loader:
    def port_weight(self, keras_variable, hf_weight_key, hook_fn):
        shape = keras_variable.shape
        file = np.full(shape[::-1] if "lm_head" in hf_weight_key else shape, 0.1, np.float32)
        keras_variable.assign(hook_fn(file, shape))


convert_mistral.convert_weights(backbone, Loader(), {})
print("in the file:", np.float32(0.1), "in the model:", np.asarray(backbone.layer_norm.scale)[0])
