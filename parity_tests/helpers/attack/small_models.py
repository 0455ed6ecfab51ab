"""Models of transformers' of one layer or two, on inputs of their own; GPT-2 and ViT's layer."""

import jax
import jax.numpy as jnp
import numpy as np
import transformers as tf
from jax.lax import stop_gradient

from helpers.attack import decoders, encoders
from helpers.attack.port import LOWEST, Model, Port, joined, split, uncached

D, N, H, T, B, F = 24, 6, 4, 7, 3, 29
EAGER = {"attn_implementation": "eager"}
WIDE = {"hidden_size": D, "num_attention_heads": N, "intermediate_size": F, **EAGER}
TEXT = WIDE | {"num_hidden_layers": 1, "vocab_size": 41, "max_position_embeddings": 13}


def norm(port: Port, name: str, x, eps: float):
    mean = x.mean(-1, keepdims=True)
    if port.has("no gradient through the mean") and "before" in name:
        mean = stop_gradient(mean)
    if port.has("variance divided by D - 1") and "before" in name:
        variance = x.var(-1, keepdims=True, ddof=1)
    else:
        variance = jnp.square(x - mean).mean(-1, keepdims=True)
    if port.has("epsilon of Keras") and "ln_1" in name:
        eps = 1e-3
    if port.has("epsilon added to the deviation") and "after" in name:
        normed = (x - mean) / (jnp.sqrt(variance) + eps)
    else:
        normed = (x - mean) * jax.lax.rsqrt(variance + eps)
    return normed * port.weight(f"{name}.weight") + port.weight(f"{name}.bias")


@jax.custom_vjp
def gelu_with_other_gradient(x):
    return jax.nn.gelu(x, approximate=False)


def gelu_backward(x, cotangent):
    gate = jax.nn.sigmoid(1.702 * x)
    return (cotangent * (gate + 1.702 * x * gate * (1 - gate)),)


gelu_with_other_gradient.defvjp(lambda x: (jax.nn.gelu(x, approximate=False), x), gelu_backward)


def conv1d(port: Port, name: str, x):
    weight = port.weight(f"{name}.weight")
    if port.has("weight of Conv1D transposed") and name.endswith("attn.c_proj"):
        weight = weight.T
    bias = port.weight(f"{name}.bias")
    if port.has("bias added on both shards") and name.endswith("mlp.c_proj"):
        half = weight.shape[0] // 2
        return (x[..., :half] @ weight[:half] + bias) + (x[..., half:] @ weight[half:] + bias)
    return x @ weight + bias


def gpt2(port: Port, input_ids):
    steps = jnp.arange(T) + port.has("positions from 1")
    x = port.weight("wte.weight")[input_ids] + port.weight("wpe.weight")[steps]
    y = norm(port, "h.0.ln_1", x, 1e-5)
    qkv = conv1d(port, "h.0.attn.c_attn", y)
    if port.has("heads outside q, k and v"):
        q, k, v = (a.swapaxes(1, 2) for a in jnp.split(qkv.reshape(B, T, N, 3 * H), 3, -1))
    else:
        q, k, v = (split(a, N) for a in jnp.split(qkv, 3, -1))
    scale = D**-0.5 if port.has("scale of the model's width") else H**-0.5
    scores = q @ k.swapaxes(-1, -2) * scale
    i, j = jnp.arange(T)[:, None], jnp.arange(T)[None]
    visible = j <= i + port.has("one key of the future")
    weights = jax.nn.softmax(jnp.where(visible, scores, LOWEST), axis=-1)
    if port.has("weights not dropped but scaled"):
        weights = weights / 0.9
    y = conv1d(port, "h.0.attn.c_proj", joined(weights @ v))
    if port.has("gradient doubled in the residual"):
        x = 2 * x - stop_gradient(x)
    x = x + y
    y = norm(port, "h.0.ln_1" if port.has("first norm's weights again") else "h.0.ln_2", x, 1e-5)
    y = jax.nn.gelu(conv1d(port, "h.0.mlp.c_fc", y), approximate=not port.has("gelu by erf"))
    x = x + conv1d(port, "h.0.mlp.c_proj", y)
    return x if port.has("last norm left out") else norm(port, "ln_f", x, 1e-5)


def vit(port: Port, hidden_states):
    x = hidden_states
    y = norm(port, "layernorm_before", x, 1e-2)
    residual = y if port.has("residual from the norm") else x
    names = [f"attention.{name}_proj" for name in "qkv"]
    if port.has("keys and values exchanged"):
        names = [names[0], names[2], names[1]]
    q, k, v = (port.linear(name, y) for name in names)
    if port.has("bias of the queries left out"):
        q = y @ port.weight("attention.q_proj.weight").T
    q, k, v = split(q, N), split(k, N), split(v, N)
    if port.has("scores in bfloat16"):
        narrow = q.astype("bfloat16") @ k.swapaxes(-1, -2).astype("bfloat16")
        scores = narrow.astype("float32") * H**-0.5
    else:
        scores = q @ k.swapaxes(-1, -2) * H**-0.5
    weights = jax.nn.softmax(scores, axis=-2 if port.has("softmax over the queries") else -1)
    y = weights @ v
    y = y.reshape(B, T, D) if port.has("heads joined without transposing") else joined(y)
    x = residual + port.linear("attention.o_proj", y)
    y = port.linear("mlp.fc1", norm(port, "layernorm_after", x, 1e-2))
    if port.has("gelu by the sigmoid"):
        y = y * jax.nn.sigmoid(1.702 * y)
    elif port.has("gradient of another gelu"):
        y = gelu_with_other_gradient(y)
    elif port.has("activation before the bias"):
        bias = port.weight("mlp.fc1.bias")
        y = jax.nn.gelu(y - bias, approximate=False) + bias
    else:
        y = jax.nn.gelu(y, approximate=False)
    return x + port.linear("mlp.fc2", y)


RANDOM = np.random.default_rng(0)
IDS = RANDOM.integers(1, 41, (B, T))
MASK = np.array([[1] * 7, [1] * 5 + [0] * 2, [0] + [1] * 3 + [0] * 3])
TYPES = RANDOM.integers(0, 2, (B, T))
GPT2 = tf.GPT2Config(
    bos_token_id=0,
    eos_token_id=0,
    n_embd=D,
    n_head=N,
    n_layer=1,
    n_inner=F,
    n_positions=13,
    vocab_size=41,
    **EAGER,
)
LLAMA = tf.LlamaConfig(**TEXT, num_key_value_heads=3, head_dim=8, pad_token_id=None)
T5 = tf.T5Config(
    d_model=D, d_kv=5, num_heads=N, num_layers=2, d_ff=F, vocab_size=41,
    relative_attention_num_buckets=8, relative_attention_max_distance=5, **EAGER,
)  # fmt: skip
VIT = tf.ViTConfig(**WIDE, layer_norm_eps=1e-2)
X = RANDOM.standard_normal((B, T, D)).astype("float32")
PADDED = {"input_ids": IDS * MASK, "attention_mask": MASK, "token_type_ids": TYPES}
MODELS = {
    "gpt2": Model(lambda: tf.GPT2Model(GPT2), gpt2, uncached, {"input_ids": IDS}),
    "vit": Model(lambda: tf.models.vit.modeling_vit.ViTLayer(VIT), vit, given={"hidden_states": X}),
    "bert": encoders.modelled(
        encoders.bert, tf.BertModel, tf.BertConfig(**TEXT), given=PADDED, **encoders.UNPOOLED
    ),
    "llama": decoders.modelled(tf.LlamaModel, LLAMA, input_ids=IDS),
    "t5": encoders.modelled(encoders.t5, tf.T5EncoderModel, T5, given={"input_ids": IDS}),
}
