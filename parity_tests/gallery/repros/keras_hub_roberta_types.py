"""KerasHub's RoBERTa does not read the embedding of token types."""

import os

os.environ["KERAS_BACKEND"] = "jax"
import keras_hub
from keras_hub.src.utils.transformers import convert_roberta

sizes = {"vocabulary_size": 9, "num_layers": 1, "num_heads": 2, "hidden_dim": 8}
backbone = keras_hub.models.RobertaBackbone(**sizes, intermediate_dim=8, max_sequence_length=4)
read = []


class Loader:
    def port_weight(self, keras_variable, hf_weight_key, hook_fn=None):
        read.append(hf_weight_key)


convert_roberta.convert_weights(backbone, Loader(), {})
print("read:", sorted(key for key in read if ".embeddings." in key and "Norm" not in key))
