"""Models of transformers': BERT, MPNet and T5's encoder."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import transformers as tf

from helpers.attack.port import Model, Port, hidden, joined, masked_softmax, split

SIZES = {
    "hidden_size": 24,
    "num_attention_heads": 6,
    "num_hidden_layers": 2,
    "intermediate_size": 29,
    "vocab_size": 41,
    "attn_implementation": "eager",
}
T5 = tf.T5Config(
    d_model=31, d_kv=7, num_heads=6, num_layers=2, d_ff=29, vocab_size=41,
    relative_attention_num_buckets=16, relative_attention_max_distance=29,
    attn_implementation="eager",
)  # fmt: skip


def modelled(forward, kind: type, config, *, given=None, **options) -> Model:
    """kind: the reference's, built with these options. given: its inputs."""
    return Model(lambda: kind(config, **options), partial(forward, config=config), hidden, given)


def visible(port: Port, attention_mask):
    if attention_mask is None or port.has("padding ignored"):
        return None
    shown = attention_mask[:, None, None] != 0
    return ~shown if port.has("mask the other way round") else shown


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
    if port.has("rows of padding set to 0"):
        weights = weights * shown.swapaxes(2, 3)
    return joined(weights @ v)


def post_norm_layers(port: Port, config, x, names: dict[str, str], shown, bias=0.0):
    """names: of what a layer of BERT or MPNet calls its own way."""
    heads, eps = config.num_attention_heads, config.layer_norm_eps
    for layer in range(config.num_hidden_layers):
        at = f"encoder.layer.{layer}"
        qkv = " ".join(f"{at}.attention.{name}" for name in names["qkv"].split())
        y = attend(port, qkv, x, heads, (config.hidden_size // heads) ** -0.5, shown, bias)
        y = port.linear(f"{at}.attention.{names['out']}", y)
        norm = f"{at}.attention.{names['norm']}"
        if port.has("pre-norm"):
            y = port.layer_norm(norm, y, eps) + x
        else:
            y = port.layer_norm(norm, y + x, eps)
        z = port.linear(f"{at}.intermediate.dense", y)
        z = jax.nn.gelu(z, approximate=port.has("gelu by tanh"))
        z = port.linear(f"{at}.output.dense", z)
        residual = x if port.has("residual from before the attention") else y
        x = port.layer_norm(f"{at}.output.LayerNorm", z + residual, eps)
    return x


def bert(
    port: Port, input_ids, attention_mask=None, token_type_ids=None, position_ids=None, *, config
):
    x = port.embed("embeddings.word_embeddings", input_ids, config.pad_token_id)
    B, T, _ = x.shape
    if token_type_ids is None or port.has("token types ignored"):
        token_type_ids = jnp.zeros((B, T), int)
    if position_ids is None or port.has("positions ignored"):
        position_ids = jnp.arange(T)
    x = x + port.embed("embeddings.token_type_embeddings", token_type_ids)
    x = x + port.embed("embeddings.position_embeddings", position_ids)
    if not port.has("norm of the embeddings left out"):
        x = port.layer_norm("embeddings.LayerNorm", x, config.layer_norm_eps)
    names = {"qkv": "self.query self.key self.value", "out": "output.dense"}
    names |= {"norm": "output.LayerNorm"}
    return post_norm_layers(port, config, x, names, visible(port, attention_mask))


def mpnet(port: Port, input_ids, attention_mask=None, position_ids=None, *, config):
    x = port.embed("embeddings.word_embeddings", input_ids, 1)
    real = (input_ids != 1).astype(int)
    positions = jnp.cumsum(real, 1) * real + 1 if position_ids is None else position_ids
    x = x + port.embed("embeddings.position_embeddings", positions, 1)
    x = port.layer_norm("embeddings.LayerNorm", x, config.layer_norm_eps)
    table = port.weight("encoder.relative_attention_bias.weight")
    bias = table[bucket(port, x.shape[1], 32, 128)].transpose(2, 0, 1)
    names = {"qkv": "attn.q attn.k attn.v", "out": "attn.o", "norm": "LayerNorm"}
    return post_norm_layers(port, config, x, names, visible(port, attention_mask), bias)


def bucket(port: Port, T: int, buckets: int, most: int):
    """(T, T): T5's and MPNet's, as transformers computes it: in float32, cut to an integer."""
    distance = jnp.arange(T)[None] - jnp.arange(T)[:, None]
    if port.has("distance the other way round"):
        distance = -distance
    if port.has("distances one too large"):
        distance = distance + 1
    half = buckets // 2
    base, away = (distance > 0) * half, jnp.abs(distance)
    if port.has("buckets of a decoder"):
        half, base, away = buckets, 0, jnp.maximum(-distance, 0)
    near = half // 2
    most = 2 * most if port.has("maximal distance doubled") else most
    logs = jnp.log(jnp.maximum(away, 1).astype("float32") / near) / math.log(most / near)
    far = near + (logs * (half - near)).astype(int)
    far = far if port.has("a clamp left out") else jnp.minimum(far, half - 1)
    return base + jnp.where(away < near, away, far)


def t5(port: Port, input_ids, attention_mask=None, *, config):
    x = port.embed("shared", input_ids)
    if port.has("embeddings times the root of D"):
        x = x * config.d_model**0.5
    T, N, eps = x.shape[1], config.num_heads, config.layer_norm_epsilon
    table = port.weight("encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight")
    buckets, most = config.relative_attention_num_buckets, config.relative_attention_max_distance
    bias = table[bucket(port, T, buckets, most)]
    by_reshaping = port.has("axes of the bias reshaped")
    bias = bias.reshape(N, T, T) if by_reshaping else bias.transpose(2, 0, 1)
    shown = visible(port, attention_mask)
    scale = config.d_kv**-0.5 if port.has("scores scaled") else 1.0
    for layer in range(config.num_layers):
        at = f"encoder.block.{layer}.layer"
        if port.has("bias in the first layer alone") and layer:
            bias = 0.0
        names = " ".join(f"{at}.0.SelfAttention.{name}" for name in "qkv")
        y = port.rms_norm(f"{at}.0.layer_norm", x, eps)
        y = attend(port, names, y, N, scale, shown, bias)
        x = x + port.linear(f"{at}.0.SelfAttention.o", y)
        y = port.rms_norm(f"{at}.1.layer_norm", x, eps)
        y = jax.nn.relu(port.linear(f"{at}.1.DenseReluDense.wi", y))
        x = x + port.linear(f"{at}.1.DenseReluDense.wo", y)
    x = port.rms_norm("encoder.final_layer_norm", x, eps)
    is_scaled = port.has("outputs scaled for tied weights")
    return x * config.d_model**-0.5 if is_scaled else x


UNPOOLED = {"add_pooling_layer": False}
MODELS = {
    "bert": modelled(
        bert, tf.BertModel, tf.BertConfig(**SIZES, max_position_embeddings=97), **UNPOOLED
    ),
    "mpnet": modelled(
        mpnet, tf.MPNetModel, tf.MPNetConfig(**SIZES, max_position_embeddings=37), **UNPOOLED
    ),
    "t5": modelled(t5, tf.T5EncoderModel, T5),
}
