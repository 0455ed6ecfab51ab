"""Whole models of transformers': BERT, MPNet and T5's encoder, of two layers each."""

import math

import jax
import jax.numpy as jnp
import transformers as tf

from helpers.attack.port import Port, joined, masked_softmax, randomised, split

D, N, EPS = 24, 6, 1e-12
SIZES = {"hidden_size": D, "num_attention_heads": N, "num_hidden_layers": 2, "vocab_size": 41}
PLAIN = SIZES | {"intermediate_size": 29, "max_position_embeddings": 97}
T5_SIZES = {"d_model": 31, "d_kv": 7, "num_heads": N, "num_layers": 2, "d_ff": 29, "vocab_size": 41}
T5_SIZES |= {"relative_attention_max_distance": 29, "relative_attention_num_buckets": 16}
EAGER = {"attn_implementation": "eager"}
SHORT = PLAIN | {"max_position_embeddings": 37}
MODELS = {
    "bert": (tf.BertModel, tf.BertConfig(**PLAIN, **EAGER), {"add_pooling_layer": False}),
    "mpnet": (
        tf.MPNetModel,
        tf.MPNetConfig(**SHORT, **EAGER),
        {"add_pooling_layer": False},
    ),
    "t5": (tf.T5EncoderModel, tf.T5Config(**T5_SIZES, **EAGER), {}),
}


def reference(family: str):
    kind, config, options = MODELS[family]
    return randomised(kind(config, **options))


def call(model, **inputs):
    return model(**inputs).last_hidden_state


def visible(port: Port, attention_mask):
    if attention_mask is None or port.has("padding ignored"):
        return None
    return attention_mask[:, None, None] != 0


def attend(port: Port, names: str, x, heads: int, scale: float, shown, bias=0.0):
    """names: of the projections of queries, keys and values."""
    q, k, v = (split(port.linear(name, x), heads) for name in names.split())
    if port.has("keys for values"):
        v = k
    if port.has("query and key swapped"):
        q, k = k, q
    scores = jnp.einsum("bnth,bnsh->bnts", q, k) * scale
    if port.has("bias after the softmax"):
        weights = masked_softmax(port, scores, shown) + bias
    else:
        weights = masked_softmax(port, scores + bias, shown)
    if port.has("attention across the batch"):
        weights = weights.mean(0, keepdims=True) + 0 * weights
    return joined(weights @ v)


def bert(port: Port, input_ids, attention_mask=None, token_type_ids=None, position_ids=None):
    x = port.embed("embeddings.word_embeddings", input_ids, 0)
    B, T, _ = x.shape
    types = jnp.zeros((B, T), int) if token_type_ids is None else token_type_ids
    if port.has("token types ignored"):
        types = 0 * types
    positions = jnp.arange(T) if position_ids is None else position_ids
    if port.has("positions ignored"):
        positions = jnp.arange(T)
    x = x + port.embed("embeddings.token_type_embeddings", types)
    x = x + port.embed("embeddings.position_embeddings", positions)
    x = port.layer_norm("embeddings.LayerNorm", x, EPS)
    shown = visible(port, attention_mask)
    for layer in range(2):
        at = f"encoder.layer.{layer}"
        names = " ".join(f"{at}.attention.self.{name}" for name in ("query", "key", "value"))
        y = attend(port, names, x, N, (D // N) ** -0.5, shown)
        y = port.linear(f"{at}.attention.output.dense", y)
        if port.has("pre-norm"):
            y = port.layer_norm(f"{at}.attention.output.LayerNorm", y, EPS) + x
        else:
            y = port.layer_norm(f"{at}.attention.output.LayerNorm", y + x, EPS)
        gelu = jax.nn.gelu(
            port.linear(f"{at}.intermediate.dense", y), approximate=port.has("gelu by tanh")
        )
        z = port.linear(f"{at}.output.dense", gelu)
        x = port.layer_norm(f"{at}.output.LayerNorm", z + y, EPS)
    return x


def bucket(port: Port, distance, buckets: int, most: int):
    """T5's and MPNet's, as transformers computes it: in float32, cut to an integer."""
    if port.has("distance the other way round"):
        distance = -distance
    if port.has("distances one too large"):
        distance = distance + 1
    half = buckets // 2
    base = (distance > 0) * half
    away = jnp.abs(distance)
    near = half // 2
    most = 2 * most if port.has("maximal distance doubled") else most
    logs = jnp.log(jnp.maximum(away, 1).astype("float32") / near) / math.log(most / near)
    if port.has("a clamp left out"):
        far = near + (logs * (half - near)).astype(int)
        return base + jnp.where(away < near, away, far)
    far = jnp.minimum(near + (logs * (half - near)).astype(int), half - 1)
    return base + jnp.where(away < near, away, far)


def relative(T: int):
    return jnp.arange(T)[None] - jnp.arange(T)[:, None]


def mpnet(port: Port, input_ids, attention_mask=None, position_ids=None):
    x = port.embed("embeddings.word_embeddings", input_ids, 1)
    real = (input_ids != 1).astype(int)
    positions = jnp.cumsum(real, 1) * real + 1 if position_ids is None else position_ids
    x = x + port.embed("embeddings.position_embeddings", positions, 1)
    x = port.layer_norm("embeddings.LayerNorm", x, EPS)
    buckets = bucket(port, relative(x.shape[1]), 32, 128)
    bias = port.weight("encoder.relative_attention_bias.weight")[buckets].transpose(2, 0, 1)
    shown = visible(port, attention_mask)
    for layer in range(2):
        at = f"encoder.layer.{layer}"
        names = " ".join(f"{at}.attention.attn.{name}" for name in "qkv")
        y = attend(port, names, x, N, (D // N) ** -0.5, shown, bias)
        y = port.linear(f"{at}.attention.attn.o", y)
        y = port.layer_norm(f"{at}.attention.LayerNorm", y + x, EPS)
        z = port.linear(
            f"{at}.output.dense",
            jax.nn.gelu(port.linear(f"{at}.intermediate.dense", y), approximate=False),
        )
        x = port.layer_norm(f"{at}.output.LayerNorm", z + y, EPS)
    return x


def t5(port: Port, input_ids, attention_mask=None):
    x = port.embed("shared", input_ids)
    most = T5_SIZES["relative_attention_max_distance"]
    buckets = bucket(port, relative(x.shape[1]), T5_SIZES["relative_attention_num_buckets"], most)
    first = "encoder.block.0.layer.0.SelfAttention"
    bias = port.weight(f"{first}.relative_attention_bias.weight")[buckets].transpose(2, 0, 1)
    shown = visible(port, attention_mask)
    scale = 7**-0.5 if port.has("scores scaled") else 1.0
    for layer in range(2):
        at = f"encoder.block.{layer}.layer"
        if port.has("bias in the first layer alone") and layer:
            bias = 0.0
        names = " ".join(f"{at}.0.SelfAttention.{name}" for name in "qkv")
        normed = port.rms_norm(f"{at}.0.layer_norm", x, 1e-6)
        x = x + port.linear(
            f"{at}.0.SelfAttention.o", attend(port, names, normed, N, scale, shown, bias)
        )
        hidden = port.linear(
            f"{at}.1.DenseReluDense.wi", port.rms_norm(f"{at}.1.layer_norm", x, 1e-6)
        )
        hidden = jax.nn.gelu(hidden) if port.has("gelu for relu") else jax.nn.relu(hidden)
        x = x + port.linear(f"{at}.1.DenseReluDense.wo", hidden)
    return port.rms_norm("encoder.final_layer_norm", x, 1e-6)


FORWARD = {"bert": bert, "mpnet": mpnet, "t5": t5}
