"""Whole models of transformers': Llama, Mistral, Gemma 2 and Mixtral, ported by one function."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import transformers as tf

from helpers.attack.port import Port, joined, masked_softmax, randomised, split

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
MODELS = {
    "llama": (tf.LlamaModel, tf.LlamaConfig(**SIZES)),
    "mistral": (tf.MistralModel, tf.MistralConfig(**SIZES, sliding_window=5)),
    "gemma2": (
        tf.Gemma2Model,
        tf.Gemma2Config(
            **SIZES, sliding_window=5, query_pre_attn_scalar=8, attn_logit_softcapping=2.0
        ),
    ),
    "mixtral": (
        tf.MixtralModel,
        tf.MixtralConfig(**SIZES, num_local_experts=5, experts_implementation="eager"),
    ),
}


def reference(family: str):
    kind, config = MODELS[family]
    return randomised(kind(config))


def call(model, **inputs):
    return model(**inputs, use_cache=False).last_hidden_state


def forward_of(family: str):
    config = MODELS[family][1]
    traits = Traits(
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        layers=config.num_hidden_layers,
        eps=config.rms_norm_eps,
        window=getattr(config, "sliding_window", None),
        theta=config.rope_parameters["rope_theta"],
        gemma=family == "gemma2",
        softcap=getattr(config, "attn_logit_softcapping", None),
        experts=config.num_local_experts if family == "mixtral" else 0,
        padding=config.pad_token_id,
        scale=getattr(config, "query_pre_attn_scalar", config.head_dim) ** -0.5,
    )
    return lambda port, **inputs: decoder(port, traits, **inputs)


@dataclass(frozen=True)
class Traits:
    """What sets the four apart.

    gemma: norms scale by 1 + weight, and each sublayer's output has one. experts: 0 for one MLP.
    """

    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    eps: float
    window: int | None
    theta: float
    gemma: bool
    softcap: float | None
    experts: int
    padding: int | None
    scale: float


def decoder(port: Port, traits: Traits, input_ids, attention_mask=None, position_ids=None):
    x = port.embed("embed_tokens", input_ids, traits.padding)
    B, T, D = x.shape
    if traits.gemma:
        x = x * D**0.5
    steps = jnp.broadcast_to(jnp.arange(T), (B, T))
    positions = steps if position_ids is None or port.has("positions ignored") else position_ids
    if port.has("positions of the first row"):
        positions = jnp.broadcast_to(positions[:1], positions.shape)
    if port.has("positions from the mask") and attention_mask is not None:
        positions = jnp.clip(jnp.cumsum(attention_mask, 1) - 1, 0)
    for layer in range(traits.layers):
        x = block(port, traits, layer, x, positions, attention_mask)
    return norm(port, traits, "norm", x)


def norm(port: Port, traits: Traits, name: str, x):
    eps = 100 * traits.eps if port.has("epsilon 100 times larger") else traits.eps
    offset = 1.0 if traits.gemma and not port.has("norm without its 1") else 0.0
    return port.rms_norm(name, x, eps, offset)


def block(port: Port, traits: Traits, layer: int, x, positions, attention_mask):
    at = f"layers.{layer}"
    normed = norm(port, traits, f"{at}.input_layernorm", x)
    y = attention(port, traits, layer, normed, positions, attention_mask)
    residual = normed if port.has("residual from the norm") else x
    if traits.gemma:
        x = residual + norm(port, traits, f"{at}.post_attention_layernorm", y)
        z = norm(port, traits, f"{at}.pre_feedforward_layernorm", x)
        z = feed_forward(port, traits, at, z)
        return x + norm(port, traits, f"{at}.post_feedforward_layernorm", z)
    after = residual + y
    z = x if port.has("parallel residual") else after
    z = norm(port, traits, f"{at}.post_attention_layernorm", z)
    return after + feed_forward(port, traits, at, z)


def attention(port: Port, traits: Traits, layer: int, x, positions, attention_mask):
    at = f"layers.{layer}.self_attn"
    q = split(port.linear(f"{at}.q_proj", x), traits.heads)
    k = split(port.linear(f"{at}.k_proj", x), traits.kv_heads)
    v = split(port.linear(f"{at}.v_proj", x), traits.kv_heads)
    q, k = rotated(port, traits, q, positions), rotated(port, traits, k, positions, keys=True)
    groups = traits.heads // traits.kv_heads
    if port.has("heads tiled"):
        k, v = jnp.tile(k, (1, groups, 1, 1)), jnp.tile(v, (1, groups, 1, 1))
    else:
        k, v = jnp.repeat(k, groups, 1), jnp.repeat(v, groups, 1)
    scores = jnp.einsum("bnth,bnsh->bnts", q, k) * traits.scale
    if traits.softcap:
        cap = traits.softcap * (1.05 if port.has("softcap 5% larger") else 1)
        scores = cap * jnp.tanh(scores / cap)
    visible = visible_keys(port, traits, layer, x.shape[1])
    if attention_mask is not None and not port.has("padding ignored"):
        shown = attention_mask[:, None, None] != 0
        visible = visible & (shown[:1] if port.has("mask of the first row") else shown)
    weights = masked_softmax(port, scores, visible)
    return port.linear(f"{at}.o_proj", joined(weights @ v))


def visible_keys(port: Port, traits: Traits, layer: int, T: int):
    """(1, 1, T, T)"""
    i, j = jnp.arange(T)[:, None], jnp.arange(T)[None]
    visible = j <= i
    if port.has("not causal in the last layer") and layer == traits.layers - 1:
        visible = jnp.ones_like(visible)
    window = traits.window
    local = layer % 2 == 0 if traits.gemma else True
    if port.has("windows in the other layers"):
        local = not local
    if window is None or not local:
        return visible[None, None]
    window += port.has("window 1 wider") - port.has("window 1 narrower")
    return (visible & (i - j < window))[None, None]


def rotated(port: Port, traits: Traits, x, positions, keys: bool = False):
    if keys and port.has("keys not rotated"):
        return x
    H = traits.head_dim
    frequencies = traits.theta ** -(jnp.arange(0, H, 2) / H)
    if port.has("queries a position too far") and not keys:
        positions = positions + 1
    angles = positions[:, None, :, None] * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if port.has("interleaved rotary"):
        even, odd = x[..., ::2], x[..., 1::2]
        turned = jnp.stack((even * cos - odd * sin, odd * cos + even * sin), -1)
        return turned.reshape(x.shape)
    left, right = x[..., : H // 2], x[..., H // 2 :]
    return jnp.concatenate((left * cos - right * sin, right * cos + left * sin), -1)


def feed_forward(port: Port, traits: Traits, at: str, x):
    if traits.experts:
        return experts(port, traits, f"{at}.mlp", x)
    gate, up = port.linear(f"{at}.mlp.gate_proj", x), port.linear(f"{at}.mlp.up_proj", x)
    if port.has("gate and up swapped"):
        gate, up = up, gate
    return port.linear(f"{at}.mlp.down_proj", activation(port, traits, gate) * up)


def activation(port: Port, traits: Traits, x):
    if traits.gemma:
        return jax.nn.gelu(x, approximate=not port.has("gelu by erf"))
    return jax.nn.gelu(x) if port.has("gelu for silu") else jax.nn.silu(x)


def experts(port: Port, traits: Traits, at: str, x):
    logits = x @ port.weight(f"{at}.gate.weight").T
    probabilities = jax.nn.softmax(logits, axis=-1)
    top, chosen = jax.lax.top_k(probabilities, 1 if port.has("one expert a token") else 2)
    if not port.has("top weights not summed to 1"):
        top = top / top.sum(-1, keepdims=True)
    order = jnp.arange(traits.experts)
    if port.has("experts 3 and 4 swapped"):
        order = order.at[jnp.array([3, 4])].set(jnp.array([4, 3]))
    gate_up = port.weight(f"{at}.experts.gate_up_proj")[order]
    down = port.weight(f"{at}.experts.down_proj")[order]
    gate, up = jnp.split(jnp.einsum("btd,efd->btef", x, gate_up), 2, axis=-1)
    y = jnp.einsum("btef,edf->bted", jax.nn.silu(gate) * up, down)
    share = (jax.nn.one_hot(chosen, traits.experts) * top[..., None]).sum(-2)
    return jnp.einsum("bted,bte->btd", y, share)
