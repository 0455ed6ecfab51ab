"""Small models of transformers', and bugs that porters plant in them, each at a known site.

The ports are right as they stand. `planted.BUGS` says what goes wrong, in which model and where.
"""

import math
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import transformers as tf
from jax.lax import stop_gradient

from helpers.attack.port import LOWEST, Port, joined, randomised, split, table
from jax_attn import parity

D, N, H, T, B, F = 24, 6, 4, 7, 3, 29
HEADS = (("q", N), ("k", 3), ("v", 3))
EAGER = {"attn_implementation": "eager"}
WIDE = {"hidden_size": D, "num_attention_heads": N, "intermediate_size": F, **EAGER}
TEXT = WIDE | {"num_hidden_layers": 1, "vocab_size": 41, "max_position_embeddings": 13}


@dataclass(frozen=True)
class Bug:
    """One bug, or several at once, in a port.

    site: a part of the reference's module path, operation or source line where it goes wrong.
    cause: how the name of a right cause begins, of several with " + "; None if no cause is right.
    """

    name: str
    model: str
    site: str
    cause: str | None = None
    backward: bool = False

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.name.split(" + "))

    @property
    def causes(self) -> tuple[str, ...]:
        return tuple(self.cause.split(" + ")) if self.cause else ()


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


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def repeated_with_mean_gradient(x, groups: int):
    return jnp.repeat(x, groups, 1)


def mean_over_groups(groups: int, _, cotangent):
    shape = cotangent.shape
    return (cotangent.reshape(shape[0], -1, groups, *shape[2:]).mean(2),)


repeated_with_mean_gradient.defvjp(
    lambda x, groups: (jnp.repeat(x, groups, 1), None), mean_over_groups
)


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


def bert(port: Port, input_ids, attention_mask, token_type_ids):
    x = port.weight("embeddings.word_embeddings.weight")[input_ids]
    x = jnp.where((input_ids == 0)[..., None], stop_gradient(x), x)  # torch's padding_idx
    types = 0 * token_type_ids if port.has("token types ignored") else token_type_ids
    x = x + port.weight("embeddings.token_type_embeddings.weight")[types]
    x = x + port.weight("embeddings.position_embeddings.weight")[:T]
    if not port.has("norm of the embeddings left out"):
        x = norm(port, "embeddings.LayerNorm", x, 1e-12)
    at = "encoder.layer.0"
    q, k, v = (
        split(port.linear(f"{at}.attention.self.{name}", x), N)
        for name in ("query", "key", "value")
    )
    shown = attention_mask[:, None, None] != 0
    if port.has("mask the other way round"):
        shown = ~shown
    hidden = -10.0 if port.has("mask by -10") else LOWEST
    scores = q @ k.swapaxes(-1, -2) * H**-0.5 + jnp.where(shown, 0.0, hidden)
    weights = jax.nn.softmax(scores, axis=-1)
    if port.has("rows of padding set to 0"):
        weights = weights * (attention_mask[:, None, :, None] != 0)
    y = port.linear(f"{at}.attention.output.dense", joined(weights @ v))
    y = norm(port, f"{at}.attention.output.LayerNorm", y + x, 1e-12)
    z = port.linear(f"{at}.intermediate.dense", y)
    z = jax.nn.gelu(z, approximate=port.has("gelu by tanh"))
    z = port.linear(f"{at}.output.dense", z)
    residual = x if port.has("residual from before the attention") else y
    return norm(port, f"{at}.output.LayerNorm", z + residual, 1e-12)


def rotated(port: Port, x):
    frequencies = (5e5 if port.has("theta of Llama 3") else 1e4) ** -(jnp.arange(0, 8, 2) / 8)
    if port.has("angles by the head"):
        angles = jnp.arange(x.shape[1])[:, None, None] * frequencies
    else:
        angles = jnp.arange(T)[:, None] * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    sin = -sin if port.has("turned backwards") else sin
    if port.has("interleaved rotary"):
        even, odd = x[..., ::2], x[..., 1::2]
        turned = jnp.stack((even * cos - odd * sin, odd * cos + even * sin), -1)
        return turned.reshape(x.shape)
    left, right = jnp.split(x, 2, -1)
    return jnp.concatenate((left * cos - right * sin, right * cos + left * sin), -1)


def rms(port: Port, name: str, x, eps: float = 1e-6):
    if port.has("mean subtracted") and name.endswith("input_layernorm"):
        x = x - x.mean(-1, keepdims=True)
    gemma = port.has("scaled by weight plus 1") and name == "norm"
    return port.rms_norm(name, x, eps, 1.0 if gemma else 0.0)


def llama(port: Port, input_ids):
    x = port.weight("embed_tokens.weight")[input_ids]
    y = rms(port, "layers.0.input_layernorm", x)
    q, k, v = (split(port.linear(f"layers.0.self_attn.{n}_proj", y), h) for n, h in HEADS)
    q, k = rotated(port, q), rotated(port, k)
    if port.has("values rotated too"):
        v = rotated(port, v)
    if port.has("heads tiled"):
        k, v = jnp.tile(k, (1, 2, 1, 1)), jnp.tile(v, (1, 2, 1, 1))
    elif port.has("gradient of groups as their mean"):
        k, v = repeated_with_mean_gradient(k, 2), repeated_with_mean_gradient(v, 2)
    else:
        k, v = jnp.repeat(k, 2, 1), jnp.repeat(v, 2, 1)
    scale = H**-0.5 if port.has("head_dim as D / N") else 8**-0.5
    visible = jnp.tril(jnp.ones((T, T), bool))
    scores = jnp.where(visible, q @ k.swapaxes(-1, -2) * scale, LOWEST)
    weights = jax.nn.softmax(scores, axis=-1)
    if port.has("weights detached"):
        weights = stop_gradient(weights)
    x = x + port.linear("layers.0.self_attn.o_proj", joined(weights @ v))
    y = rms(port, "layers.0.post_attention_layernorm", x)
    gate, up = (port.linear(f"layers.0.mlp.{name}_proj", y) for name in ("gate", "up"))
    if port.has("gate and up exchanged"):
        gate, up = up, gate
    return rms(port, "norm", x + port.linear("layers.0.mlp.down_proj", jax.nn.silu(gate) * up))


def buckets(port: Port):
    distance = jnp.arange(T)[None] - jnp.arange(T)[:, None]
    if port.has("distance the other way round"):
        distance = -distance
    half = 4
    base, away = (distance > 0) * half, jnp.abs(distance)
    if port.has("buckets of a decoder"):
        half, base, away = 8, 0 * base, jnp.maximum(-distance, 0)
    near = half // 2
    logs = jnp.log(jnp.maximum(away, 1) / near) / math.log(5 / near)
    far = jnp.minimum(near + (logs * (half - near)).astype(int), half - 1)
    return base + jnp.where(away < near, away, far)


def t5(port: Port, input_ids):
    x = port.weight("shared.weight")[input_ids]
    if port.has("embeddings times the root of D"):
        x = x * D**0.5
    table = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    bias = port.weight(table)[buckets(port)]
    if port.has("axes of the bias reshaped"):
        bias = bias.reshape(N, T, T)
    else:
        bias = bias.transpose(2, 0, 1)
    for layer in range(2):
        at = f"encoder.block.{layer}.layer"
        y = port.rms_norm(f"{at}.0.layer_norm", x, 1e-6)
        q, k, v = (split(port.linear(f"{at}.0.SelfAttention.{name}", y), N) for name in "qkv")
        scores = q @ k.swapaxes(-1, -2)
        if port.has("scores scaled"):
            scores = scores * 5**-0.5
        if layer == 0 or not port.has("bias in the first layer alone"):
            scores = scores + bias
        y = joined(jax.nn.softmax(scores, axis=-1) @ v)
        x = x + port.linear(f"{at}.0.SelfAttention.o", y)
        y = port.linear(f"{at}.1.DenseReluDense.wi", port.rms_norm(f"{at}.1.layer_norm", x, 1e-6))
        y = jax.nn.relu(y)
        x = x + port.linear(f"{at}.1.DenseReluDense.wo", y)
    x = port.rms_norm("encoder.final_layer_norm", x, 1e-6)
    return x * D**-0.5 if port.has("outputs scaled for tied weights") else x


def hidden(model, **inputs):
    return model(**inputs).last_hidden_state


def uncached(model, **inputs):
    return model(**inputs, use_cache=False).last_hidden_state


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
# The reference's class and config, how it is called, its port, and inputs.
MODELS = {
    "gpt2": (lambda: tf.GPT2Model(GPT2), uncached, gpt2, {"input_ids": IDS}),
    "vit": (
        lambda: tf.models.vit.modeling_vit.ViTLayer(VIT),
        None,
        vit,
        {"hidden_states": X},
    ),
    "bert": (
        lambda: tf.BertModel(tf.BertConfig(**TEXT), add_pooling_layer=False),
        hidden,
        bert,
        PADDED,
    ),
    "llama": (lambda: tf.LlamaModel(LLAMA), uncached, llama, {"input_ids": IDS}),
    "t5": (lambda: tf.T5EncoderModel(T5), hidden, t5, {"input_ids": IDS}),
}


def explain(model: str, wrong: frozenset[str] = frozenset(), gradients: bool = False):
    make, call, forward, inputs = MODELS[model]
    reference = randomised(make())
    port = Port(reference, forward)
    port.wrong = wrong
    return parity.explain(
        reference,
        port,
        inputs,
        layout=table(reference),
        reference_call=call,
        gradients=gradients,
        transforms=("jit",),
    )
