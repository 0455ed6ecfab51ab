"""Modules with learned keys and sinks: their draws, and transformers' gpt-oss attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import GptOssConfig
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss

from helpers.attention.small_attention import numpy_weights
from jax_attn import parity, transfer
from jax_attn.attention import Mask
from jax_attn.attention.rotary import Rotary
from jax_attn.nn import GroupedQueryAttention
from jax_attn.parity import Verdict
from jax_attn.transfer import FROM_HEADS, TO_HEADS, Layout, row

B, T, N, K, H, D, WINDOW = 2, 7, 6, 3, 10, 14, 2
LAYOUT = Layout(
    *(TO_HEADS.under(name, name) for name in ("q_proj", "k_proj", "v_proj")),
    FROM_HEADS.under("o_proj", "out_proj"),
    row("sinks", "sinks"),
)


@pytest.fixture(scope="module")
def pair():
    """transformers' attention in a sliding window and ours with its weights."""
    config = GptOssConfig(
        hidden_size=D,
        num_attention_heads=N,
        num_key_value_heads=K,
        head_dim=H,
        num_hidden_layers=1,
        sliding_window=WINDOW + 1,
        attn_implementation="eager",
        rope_parameters={"rope_type": "default", "rope_theta": 20.0},
    )
    torch.manual_seed(0)
    reference, embedding = gpt_oss.GptOssAttention(config, 0), gpt_oss.GptOssRotaryEmbedding(config)
    torch.nn.init.normal_(reference.sinks)
    rotary = Rotary(20.0)
    port = GroupedQueryAttention(D, N, K, head_dim=H, rotary=rotary, sinks=True, **numpy_weights())
    port.eval()
    transfer.load(port, reference.eval().state_dict(), LAYOUT)

    def call(module, x):
        distance = torch.arange(T)[None] - torch.arange(T)[:, None]
        hidden = (distance > 0) | (distance < -WINDOW)
        mask = torch.zeros(1, 1, T, T, dtype=x.dtype).masked_fill(hidden, -torch.inf)
        return module(x, embedding(x, torch.arange(T)[None]), mask)[0]

    return reference, port, call


def at_once(module, x):
    return module(x, mask=Mask.window(WINDOW, 0))


def token_by_token(module, x):
    cache = module.empty_cache(B, window=WINDOW + 1, dtype=x.dtype)
    outs = []
    for t in range(T):
        out, cache = module(x[:, t : t + 1], cache=cache)
        outs.append(out)
    return jnp.concatenate(outs, axis=1)


X = np.random.default_rng(1).standard_normal((B, T, D)).astype(np.float32)


@pytest.mark.slow
@pytest.mark.parametrize(("port_call", "gradients"), [(at_once, True), (token_by_token, False)])
def test_sinks_are_gpt_oss_s(pair, port_call, gradients):
    reference, port, call = pair
    options = {"reference_call": call, "gradients": gradients, "transforms": ("jit",)}
    result = parity.check(reference, port, {"x": X}, port_call=port_call, layout=LAYOUT, **options)
    assert result.verdict is Verdict.PASS, str(result)


@pytest.mark.slow
def test_they_are_drawn_as_torch_and_gpt_oss_draw_them():
    heads, width = 500, 2
    module = GroupedQueryAttention(
        heads * width, heads, heads, add_bias_kv=True, sinks=True, **numpy_weights()
    )
    theirs = torch.nn.MultiheadAttention(heads * width, heads, add_bias_kv=True)
    deviation = (heads * width) ** -0.5
    rows = {
        "bias_k": (module.bias_k, (heads, width), deviation),
        "bias_v": (module.bias_v, (heads, width), deviation),
        "sinks": (module.sinks, (heads,), 0.02),
        "torch's": (theirs.bias_k.detach(), (1, 1, heads * width), deviation),
    }
    for name, (drawn, shape, deviation) in rows.items():
        drawn = np.asarray(drawn)
        assert drawn.shape == shape, name
        # The deviation of n draws is itself off by 1/√(2n), relatively: six times that.
        assert abs(drawn.std() / deviation - 1) < 6 / np.sqrt(2 * drawn.size), name
        assert not np.array_equal(module.bias_k[...], module.bias_v[...])


@pytest.mark.slow
def test_they_compute_in_the_module_s_dtype():
    module = GroupedQueryAttention(
        D,
        N,
        K,
        head_dim=H,
        add_bias_kv=True,
        add_zero_attn=True,
        sinks=True,
        dtype="bfloat16",
        **numpy_weights(),
    )
    module.eval()
    with jax.numpy_dtype_promotion("strict"):
        assert module(jnp.asarray(X)).dtype == "bfloat16"
        assert module.attention_weights(jnp.asarray(X)).shape == (B, N, T, T + 2)
