"""Models of transformers': Llama, Mistral, Gemma 2 and Mixtral, ported by one function."""

from functools import partial

import jax
import jax.numpy as jnp
import transformers as tf
from jax.lax import stop_gradient

from helpers.attack.port import Model, Port, joined, masked_softmax, split, uncached

SIZES = {
    "hidden_size": 24,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "num_hidden_layers": 2,
    "intermediate_size": 29,
    "vocab_size": 41,
    "max_position_embeddings": 97,
    "attn_implementation": "eager",
}


def modelled(kind: type, config, **given) -> Model:
    """kind: the reference's. given: its inputs."""
    forward = partial(decoder, config=config)
    return Model(lambda: kind(config), forward, uncached, given)


def decoder(port: Port, input_ids, attention_mask=None, position_ids=None, *, config):
    x = port.embed("embed_tokens", input_ids, config.pad_token_id)
    if is_gemma(config):
        x = x * x.shape[-1] ** 0.5
    positions = position_ids
    if position_ids is None or port.has("positions ignored"):
        positions = jnp.arange(x.shape[1])[None]
    if port.has("positions of the first row"):
        positions = positions[:1]
    if port.has("positions from the mask") and attention_mask is not None:
        positions = jnp.clip(jnp.cumsum(attention_mask, 1) - 1, 0)
    for layer in range(config.num_hidden_layers):
        x = block(port, config, layer, x, positions, attention_mask)
    return norm(port, config, "norm", x)


def is_gemma(config) -> bool:
    """Gemma's norms scale by 1 + weight, and the output of each sublayer has one."""
    return config.model_type == "gemma2"


def norm(port: Port, config, name: str, x):
    eps = config.rms_norm_eps * (100 if port.has("epsilon 100 times larger") else 1)
    is_offset = is_gemma(config) and not port.has("norm without its 1")
    is_offset |= name == "norm" and port.has("scaled by weight plus 1")
    if name.endswith("input_layernorm") and port.has("mean subtracted"):
        x = x - x.mean(-1, keepdims=True)
    return port.rms_norm(name, x, eps, float(is_offset))


def block(port: Port, config, layer: int, x, positions, attention_mask):
    at = f"layers.{layer}"
    normed = norm(port, config, f"{at}.input_layernorm", x)
    y = attention(port, config, layer, normed, positions, attention_mask)
    residual = normed if port.has("residual from the norm") else x
    if is_gemma(config):
        x = residual + norm(port, config, f"{at}.post_attention_layernorm", y)
        z = norm(port, config, f"{at}.pre_feedforward_layernorm", x)
        z = feed_forward(port, config, at, z)
        return x + norm(port, config, f"{at}.post_feedforward_layernorm", z)
    after = residual + y
    z = x if port.has("parallel residual") else after
    z = norm(port, config, f"{at}.post_attention_layernorm", z)
    return after + feed_forward(port, config, at, z)


def attention(port: Port, config, layer: int, x, positions, attention_mask):
    at, kv_heads = f"layers.{layer}.self_attn", config.num_key_value_heads
    q = split(port.linear(f"{at}.q_proj", x), config.num_attention_heads)
    k, v = (split(port.linear(f"{at}.{name}_proj", x), kv_heads) for name in "kv")
    q, k = rotated(port, config, q, positions), rotated(port, config, k, positions, keys=True)
    if port.has("values rotated too"):
        v = rotated(port, config, v, positions)
    groups = q.shape[1] // kv_heads
    k, v = repeated(port, k, groups), repeated(port, v, groups)
    by_width = port.has("head_dim as D / N")
    head_dim = x.shape[-1] // q.shape[1] if by_width else config.head_dim
    scale = getattr(config, "query_pre_attn_scalar", head_dim) ** -0.5
    scores = jnp.einsum("bnth,bnsh->bnts", q, k) * scale
    if cap := getattr(config, "attn_logit_softcapping", None):
        cap = cap * (1.05 if port.has("softcap 5% larger") else 1)
        scores = cap * jnp.tanh(scores / cap)
    visible = visible_keys(port, config, layer, x.shape[1])
    if attention_mask is not None and not port.has("padding ignored"):
        shown = attention_mask[:, None, None] != 0
        visible = visible & (shown[:1] if port.has("mask of the first row") else shown)
    weights = masked_softmax(port, scores, visible)
    if port.has("weights detached"):
        weights = stop_gradient(weights)
    return port.linear(f"{at}.o_proj", joined(weights @ v))


def repeated(port: Port, x, groups: int):
    """(B, K, S, H) -> (B, N, S, H)"""
    if port.has("heads tiled"):
        return jnp.tile(x, (1, groups, 1, 1))
    if port.has("gradient of groups as their mean"):
        return repeated_with_mean_gradient(x, groups)
    return jnp.repeat(x, groups, 1)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def repeated_with_mean_gradient(x, groups: int):
    return jnp.repeat(x, groups, 1)


def mean_over_groups(groups: int, _, cotangent):
    shape = cotangent.shape
    return (cotangent.reshape(shape[0], -1, groups, *shape[2:]).mean(2),)


repeated_with_mean_gradient.defvjp(
    lambda x, groups: (jnp.repeat(x, groups, 1), None), mean_over_groups
)


def visible_keys(port: Port, config, layer: int, T: int):
    """(1, 1, T, T)"""
    i, j = jnp.arange(T)[:, None], jnp.arange(T)[None]
    visible = j <= i
    if port.has("not causal in the last layer") and layer == config.num_hidden_layers - 1:
        visible = jnp.ones_like(visible)
    window = getattr(config, "sliding_window", None)
    is_local = layer % 2 == 0 or not is_gemma(config)
    if window is None or is_local == port.has("windows in the other layers"):
        return visible[None, None]
    window += port.has("window 1 wider") - port.has("window 1 narrower")
    return (visible & (i - j < window))[None, None]


def rotated(port: Port, config, x, positions, keys: bool = False):
    """Turn by halves. x (B, N, T, H); positions (B, T), or (1, T) for all"""
    if keys and port.has("keys not rotated"):
        return x
    theta = 5e5 if port.has("theta of Llama 3") else config.rope_parameters["rope_theta"]
    frequencies = theta ** -(jnp.arange(0, config.head_dim, 2) / config.head_dim)
    if port.has("queries a position too far") and not keys:
        positions = positions + 1
    angles = positions[:, None, :, None] * frequencies
    if port.has("angles by the head"):
        angles = jnp.arange(x.shape[1])[:, None, None] * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    sin = -sin if port.has("turned backwards") else sin
    if port.has("interleaved rotary"):
        even, odd = x[..., ::2], x[..., 1::2]
        turned = jnp.stack((even * cos - odd * sin, odd * cos + even * sin), -1)
        return turned.reshape(x.shape)
    left, right = jnp.split(x, 2, -1)
    return jnp.concatenate((left * cos - right * sin, right * cos + left * sin), -1)


def feed_forward(port: Port, config, at: str, x):
    if config.model_type == "mixtral":
        return experts(port, f"{at}.mlp", x)
    gate, up = (port.linear(f"{at}.mlp.{name}_proj", x) for name in ("gate", "up"))
    if port.has("gate and up swapped"):
        gate, up = up, gate
    return port.linear(f"{at}.mlp.down_proj", activation(port, config, gate) * up)


def activation(port: Port, config, x):
    if is_gemma(config):
        return jax.nn.gelu(x, approximate=not port.has("gelu by erf"))
    return jax.nn.gelu(x) if port.has("gelu for silu") else jax.nn.silu(x)


def experts(port: Port, at: str, x):
    probabilities = jax.nn.softmax(x @ port.weight(f"{at}.gate.weight").T, axis=-1)
    top, chosen = jax.lax.top_k(probabilities, 1 if port.has("one expert a token") else 2)
    top = top / top.sum(-1, keepdims=True)
    order = jnp.array([0, 1, 2, 4, 3] if port.has("experts 3 and 4 swapped") else range(5))
    gate_up = port.weight(f"{at}.experts.gate_up_proj")[order]
    down = port.weight(f"{at}.experts.down_proj")[order]
    gate, up = jnp.split(jnp.einsum("btd,efd->btef", x, gate_up), 2, axis=-1)
    y = jnp.einsum("btef,edf->bted", jax.nn.silu(gate) * up, down)
    share = (jax.nn.one_hot(chosen, 5) * top[..., None]).sum(-2)
    return jnp.einsum("bted,bte->btd", y, share)


MODELS = {
    "llama": modelled(tf.LlamaModel, tf.LlamaConfig(**SIZES)),
    "mistral": modelled(tf.MistralModel, tf.MistralConfig(**SIZES, sliding_window=5)),
    "gemma2": modelled(
        tf.Gemma2Model,
        tf.Gemma2Config(
            **SIZES, sliding_window=5, query_pre_attn_scalar=8, attn_logit_softcapping=2.0
        ),
    ),
    "mixtral": modelled(
        tf.MixtralModel,
        tf.MixtralConfig(**SIZES, num_local_experts=5, experts_implementation="eager"),
    ),
}
