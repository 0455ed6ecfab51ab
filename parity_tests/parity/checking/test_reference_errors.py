"""A reference that errs by itself: INCONCLUSIVE, by name, and FAIL for a port that is far off."""

import re

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from helpers.parity.findings import kinds, sentences
from jax_attn.parity import check
from jax_attn.transfer import Layout, linear, load, row

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
