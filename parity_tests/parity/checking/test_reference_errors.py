"""A reference that errs by itself: INCONCLUSIVE, by name, and FAIL for a port that is far off."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from helpers.parity.findings import kinds, sentences
from jax_attn import MultiHeadAttention
from jax_attn.parity import check
from jax_attn.transfer import LAYER_NORM, LAYOUTS, LINEAR, Layout, linear, load, row

LAYOUT = Layout(row("weight", "kernel", linear), row("bias", "bias"))


def by_autocast(module, x):
    with torch.autocast("cpu", torch.bfloat16):
        y = module(x)
    return y.float()


def by_cast(module, x):
    weight, bias = module.weight.to(torch.float16), module.bias.to(torch.float16)
    return torch.nn.functional.linear(x.to(torch.float16), weight, bias).float()


def inference_only(module, x):
    return module(x) * (1.001 if torch.is_inference_mode_enabled() else 1)


def narrow(dtype, scale=1.0):
    def call(module, x):
        kernel, bias = (p[...].astype(dtype) for p in (module.kernel, module.bias))
        return scale * (x.astype(dtype) @ kernel + bias).astype(jnp.float32)

    return call


def plain(module, x):
    return module(x)


def lost(module, x):
    return module(x) / jnp.where(x[:, :1] > 0, 1, 0)


# name -> (reference_call, port_call, verdict, the kind of a reason, what it names)
ROWS = {
    "autocast": (
        by_autocast,
        narrow(jnp.bfloat16),
        "INCONCLUSIVE",
        "reference-errs",
        r"casts to bfloat16 at test_reference_errors.py:\d+ \(torch.autocast does so, too\)",
    ),
    "autocast, a port in float32": (by_autocast, plain, "INCONCLUSIVE", "reference-errs", ""),
    "a cast": (by_cast, narrow(jnp.float16), "INCONCLUSIVE", "reference-errs", "to float16 at"),
    "in inference mode": (
        inference_only,
        plain,
        "INCONCLUSIVE",
        "inference-errs",
        "in inference mode: output: ",
    ),
    "autocast, a port far off": (by_autocast, narrow(jnp.bfloat16, 1.3), "FAIL", "over-budget", ""),
    "autocast, a port that is not finite": (by_autocast, lost, "FAIL", "not-finite", ""),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_reference_that_errs_is_the_reason_and_not_the_port(name):
    reference_call, port_call, verdict, kind, named = ROWS[name]
    torch.manual_seed(0)
    reference, port = torch.nn.Linear(11, 7), nnx.Linear(11, 7, rngs=nnx.Rngs(0))
    load(port, reference.state_dict(), LAYOUT)
    x = np.random.default_rng(0).standard_normal((5, 11))
    calls = {"reference_call": reference_call, "port_call": port_call}
    result = check(reference, port, (x,), layout=LAYOUT, transforms=("jit",), **calls)
    assert result.verdict == verdict
    assert re.search(named, "; ".join(sentences(result, kind)))
    assert kind in kinds(result, "failure" if verdict == "FAIL" else "doubt")


class Layer(nnx.Module):
    """One layer of torch's encoder."""

    def __init__(self, rngs: nnx.Rngs):
        norm = partial(nnx.LayerNorm, 12, epsilon=1e-5, use_fast_variance=False, rngs=rngs)
        self.self_attn = MultiHeadAttention(12, 2, rngs=rngs)
        self.norm1, self.norm2 = norm(), norm()
        self.linear1 = nnx.Linear(12, 17, rngs=rngs)
        self.linear2 = nnx.Linear(17, 12, rngs=rngs)

    def __call__(self, x, padded):
        x = self.norm1(x + self.self_attn(x, mask=~padded[:, None, None, :]))
        return self.norm2(x + self.linear2(jax.nn.relu(self.linear1(x))))


OF_LAYER = {"self_attn": LAYOUTS["torch_mha"], "norm1": LAYER_NORM, "norm2": LAYER_NORM}
OF_LAYER |= {"linear1": LINEAR, "linear2": LINEAR}


def doubled_and_shifted(y):
    """What follows an encoder: where it leaves 0, this does not."""
    return 2 * y + 1


@pytest.mark.slow
@pytest.mark.parametrize("after", [lambda y: y, doubled_and_shifted])
@pytest.mark.parametrize(("nested", "noted"), [(True, 1), (False, 0)])
def test_padding_that_torch_leaves_out_in_inference_is_noted(nested, noted, after):
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(12, 2, 17, dropout=0.0, batch_first=True)
    reference = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=nested).eval()
    layout = Layout(*(part.under(f"layers.0.{name}", name) for name, part in OF_LAYER.items()))
    port = Layer(nnx.Rngs(0))
    load(port, reference.state_dict(), layout)
    x = np.random.default_rng(0).standard_normal((2, 7, 12))
    result = check(
        reference,
        port,
        {"x": x, "padded": np.arange(7) >= np.array([[5], [7]])},
        layout=layout,
        reference_call=lambda module, x, padded: after(module(x, src_key_padding_mask=padded)),
        port_call=lambda module, x, padded: after(module(x, padded)),
        transforms=("jit",),
    )
    assert result.verdict == "PASS", str(result)
    assert len(sentences(result, "padding-left-out")) == noted
