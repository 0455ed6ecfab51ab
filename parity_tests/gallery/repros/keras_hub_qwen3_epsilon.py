"""The norms of queries and keys in KerasHub's Qwen 3 have another epsilon than its other norms."""

import os

os.environ["KERAS_BACKEND"] = "jax"
import keras_hub

backbone = keras_hub.models.Qwen3Backbone(
    vocabulary_size=9,
    num_layers=1,
    num_query_heads=2,
    num_key_value_heads=2,
    head_dim=4,
    hidden_dim=8,
    intermediate_dim=8,
    layer_norm_epsilon=1e-6,
)
layer = backbone.get_layer("transformer_layer_0")
print("input norm:", layer._self_attention_layernorm.epsilon)
print("query norm:", layer._self_attention_layer._query_dense_layer_norm.epsilon)
