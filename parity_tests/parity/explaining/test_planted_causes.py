"""Mistakes of ports, each in a small port: `explain` names it, and the right port passes."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from helpers.attack.port import LOWEST, Port, randomised
from jax_attn import parity

B, T, D, F, E = 2, 7, 6, 10, 11
X = np.random.default_rng(0).standard_normal((B, T, D)).astype(np.float32)


class Called(nn.Module):
    """A reference that is a function of its layers."""

    def __init__(self, function: Callable, **layers: nn.Module):
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x):
        return self.function(self, x)


class Row(NamedTuple):
    """A reference and its port.

    forward: (port, x) -> output of the port, which is wrong if `port.has("wrong")`. cause: how the
    name of its cause begins. says: a part of its words. is_random: whether its weights are drawn
    large, and not as torch draws them.
    """

    make: Callable[[], nn.Module]
    forward: Callable
    cause: str
    says: str = ""
    is_random: bool = True
    gradients: bool = False


def convolved(port: Port, x, padding, stride=1, dilation=1, groups=1):
    y = jax.lax.conv_general_dilated(
        x.swapaxes(1, 2),
        port.weight("conv.weight"),
        (stride,),
        [padding],
        rhs_dilation=(dilation,),
        dimension_numbers=("NCH", "OIH", "NCH"),
        feature_group_count=groups,
        precision="highest",
    )
    return y + port.weight("conv.bias")[:, None]


def conv(then: Callable = torch.tanh, **options):
    layer = lambda: nn.Conv1d(D, 4, 3, padding=1, **options)  # noqa: E731
    return lambda: Called(lambda m, x: then(m.conv(x.mT)), conv=layer())


def padded(port, x):
    return jnp.tanh(convolved(port, x, (0, 2) if port.has("wrong") else (1, 1), stride=2))


def pooled(**wrong):
    def forward(port, x):
        y = convolved(port, x, **{"padding": (1, 1), **(wrong if port.has("wrong") else {})})
        return jnp.tanh(y).mean(-1)

    return forward


def grouped(port, x):
    x = x.reshape(B, T, 2, 3).swapaxes(2, 3).reshape(x.shape) if port.has("wrong") else x
    return jnp.tanh(convolved(port, x, (1, 1), groups=2))


def group_norm(port, x, groups, eps):
    y = x.swapaxes(1, 2).reshape(B, groups, -1)
    y = (y - y.mean(-1, keepdims=True)) * jax.lax.rsqrt(y.var(-1, keepdims=True) + eps)
    y = y.reshape(B, D, T) * port.weight("norm.weight")[:, None]
    return jnp.tanh(y + port.weight("norm.bias")[:, None])


def of_group_norm(groups=2, eps=1e-5):
    return lambda port, x: group_norm(port, x, *((groups, eps) if port.has("wrong") else (2, 1e-5)))


def gates(port, x, h):
    z = x @ port.weight("cell.weight_ih_l0").T + port.weight("cell.bias_ih_l0")
    return z, h @ port.weight("cell.weight_hh_l0").T + port.weight("cell.bias_hh_l0")


def lstm(port, x):
    def step(carry, x):
        h, c = carry
        i, f, g, o = jnp.split(sum(gates(port, x, h)), 4, -1)
        g, o = (o, g) if port.has("wrong") else (g, o)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    zero = jnp.zeros((B, E))
    return jax.lax.scan(step, (zero, zero), x.swapaxes(0, 1)[:3])[1].swapaxes(0, 1)


def gru(port, x):
    def step(h, x):
        a, b = (jnp.split(z, 3, -1) for z in gates(port, x, h))
        r, z = (jax.nn.sigmoid(a[n] + b[n]) for n in range(2))
        r, z = (z, r) if port.has("wrong") else (r, z)
        h = (1 - z) * jnp.tanh(a[2] + r * b[2]) + z * h
        return h, h

    return jax.lax.scan(step, jnp.zeros((B, E)), x.swapaxes(0, 1)[:3])[1].swapaxes(0, 1)


def recurrent(kind):
    return lambda: Called(lambda m, x: m.cell(x[:, :3])[0], cell=kind(D, E, batch_first=True))


def routed(m, x):
    weights, chosen = torch.topk(m.gate(x).softmax(-1), 2)
    return torch.zeros(B, T, E).scatter(-1, chosen, weights / weights.sum(-1, keepdim=True))


def routed_port(port, x):
    weights, chosen = jax.lax.top_k(jax.nn.softmax(port.linear("gate", x)), 2)
    if not port.has("wrong"):
        weights = weights / weights.sum(-1, keepdims=True)
    return (
        jnp.zeros((B, T, E))
        .at[jnp.arange(B)[:, None, None], jnp.arange(T)[:, None], chosen]
        .set(weights)
    )


def shared(m, x):
    return torch.tanh(m.expert(x)) + m.shared_expert(x)


def shared_port(port, x):
    y = jnp.tanh(port.linear("expert", x))
    return y if port.has("wrong") else y + port.linear("shared_expert", x)


def gated(m, x):
    return m.down(functional.silu(m.gate(x)) * m.up(x))


def gated_port(port, x):
    gate, up = ("up", "gate") if port.has("wrong") else ("gate", "up")
    return port.linear("down", jax.nn.silu(port.linear(gate, x)) * port.linear(up, x))


def quick(x):
    return x * jax.nn.sigmoid(1.702 * x)


def activated(right, wrong):
    return lambda port, x: (wrong if port.has("wrong") else right)(port.linear("up", x))


def last(m, x):
    return torch.tanh(m.up(x))[:, -1]


def last_port(port, x):
    return jnp.tanh(port.linear("up", x))[:, 0 if port.has("wrong") else -1]


def changed(change):
    def forward(port, x):
        weight = port.weight("up.weight")
        weight = change(port, weight) if port.has("wrong") else weight
        return jnp.tanh(x @ weight.T + port.weight("up.bias"))

    return forward


def loss(port, x):
    y = jnp.square(jnp.tanh(port.linear("up", x)))
    return y.sum() / (B * T) if port.has("wrong") else y.mean()


HIDDEN = np.zeros((B, 1, T), bool)
HIDDEN[1] = True  # a row that sees no key


def masked(m, x):
    return torch.softmax(m.up(x) @ x.mT + torch.where(torch.tensor(HIDDEN), LOWEST, 0.0), -1) @ x


def masked_port(port, x):
    scores = port.linear("up", x) @ x.swapaxes(1, 2)
    replaced = jnp.where(HIDDEN, LOWEST, scores)
    added = scores + jnp.where(HIDDEN, LOWEST, 0.0)
    return jax.nn.softmax(replaced if port.has("wrong") else added) @ x


def up(function):
    return lambda: Called(function, up=nn.Linear(D, F))


def two_layers():
    return Called(
        lambda m, x: torch.tanh(m.up(x)) + m.other(x), up=nn.Linear(D, F), other=nn.Linear(D, F)
    )


def tied(port, x):
    weight = port.weight("up.weight" if port.has("wrong") else "other.weight")
    return jnp.tanh(port.linear("up", x)) + (x @ weight.T + port.weight("other.bias"))


def narrow(dtype):
    return changed(lambda port, weight: weight.astype(dtype).astype(jnp.float32))


def packed(m, x):
    q, k, v = m.qkv(x).split(D, -1)
    return torch.softmax(q @ k.mT, -1) @ v


def packed_port(port, x):
    q, k, v = jnp.split(x @ port.weight("qkv.weight").T + port.weight("qkv.bias"), 3, -1)
    k, v = (v, k) if port.has("wrong") else (k, v)
    return jax.nn.softmax(q @ k.swapaxes(1, 2), -1) @ v


TANH = up(lambda m, x: torch.tanh(m.up(x)))
ROWS = {
    "epsilon of a group norm": Row(
        lambda: Called(lambda m, x: torch.tanh(m.norm(x.mT)), norm=nn.GroupNorm(2, D)),
        of_group_norm(eps=1e-3),
        "epsilon",
        "0.001",
    ),
    "groups of a group norm": Row(
        lambda: Called(lambda m, x: torch.tanh(m.norm(x.mT)), norm=nn.GroupNorm(2, D)),
        of_group_norm(groups=3),
        "norm (groups)",
        "3 groups in place of 2",
    ),
    "padding on one side": Row(conv(stride=2), padded, "convolution (padding)", "0 before"),
    "stride before a pool": Row(
        conv(lambda y: torch.tanh(y).mean(-1)), pooled(stride=2), "convolution (stride)"
    ),
    "dilation before a pool": Row(
        conv(lambda y: torch.tanh(y).mean(-1)),
        pooled(dilation=2),
        "convolution (dilation)",
    ),
    "groups interleaved": Row(conv(groups=2), grouped, "convolution (groups)"),
    "gates of an LSTM": Row(recurrent(nn.LSTM), lstm, "gate order", "0, 1, 3, 2", False),
    "gates of a GRU": Row(recurrent(nn.GRU), gru, "gate order", "1, 0, 2", False),
    "keys and values exchanged": Row(
        lambda: Called(packed, qkv=nn.Linear(D, 3 * D)), packed_port, "packed order"
    ),
    "router not normalized": Row(
        lambda: Called(routed, gate=nn.Linear(D, E)), routed_port, "router (not normalized)"
    ),
    "shared expert left out": Row(
        lambda: Called(shared, expert=nn.Linear(D, F), shared_expert=nn.Linear(D, F)),
        shared_port,
        "residual (left out)",
        "`shared_expert`",
    ),
    "gate and up exchanged": Row(
        lambda: Called(gated, gate=nn.Linear(D, F), up=nn.Linear(D, F), down=nn.Linear(F, D)),
        gated_port,
        "packed order",
    ),
    "quick GELU for GELU": Row(
        up(lambda m, x: functional.gelu(m.up(x))),
        activated(lambda y: jax.nn.gelu(y, approximate=False), quick),
        "activation (gelu by sigmoid",
    ),
    "GELU for quick GELU": Row(
        up(lambda m, x: (y := m.up(x)) * torch.sigmoid(1.702 * y)),
        activated(quick, lambda y: jax.nn.gelu(y, approximate=False)),
        "activation (gelu)",
    ),
    "first for last token": Row(up(last), last_port, "pooling (first token)"),
    "a weight in bfloat16": Row(TANH, narrow("bfloat16"), "parameter (in bfloat16)", "`up.weight`"),
    "a weight in float16": Row(TANH, narrow("float16"), "parameter (in float16)", "`up.weight`"),
    "a weight reshaped": Row(
        TANH, changed(lambda port, w: w.reshape(D, F).T), "transposed", "`up.weight`"
    ),
    "tied to another weight": Row(two_layers, tied, "packed order", "`up.weight` in place of"),
    "the sum of a loss": Row(up(lambda m, x: torch.tanh(m.up(x)).square().mean()), loss, "scale"),
    "an empty row replaced": Row(
        lambda: Called(masked, up=nn.Linear(D, D)), masked_port, "mask (empty row", gradients=True
    ),
}


def explained(row: Row, wrong: str) -> parity.Explanation:
    torch.manual_seed(0)
    reference = randomised(row.make()) if row.is_random else row.make()
    port = Port(reference, row.forward, wrong)
    options = {"gradients": row.gradients, "transforms": ("jit",)}
    return parity.explain(reference, port, (X,), **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_the_cause_is_named(name):
    row = ROWS[name]
    explanation = explained(row, "wrong")
    causes = [c for region in explanation.regions for c in region.causes if c.confirmed]
    assert causes, str(explanation)
    assert all(cause.name.startswith(row.cause) for cause in causes), str(explanation)
    assert any(row.says in cause.says for cause in causes), str(explanation)


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_the_right_port_is_not_accused(name):
    explanation = explained(ROWS[name], "")
    assert explanation.regions == ()
    assert all(tensor.verdict == "PASS" for tensor in explanation.result.tensors)
