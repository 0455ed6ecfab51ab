"""One causal transformer block in torch, and its port as a module of every kind.

`bug` names a mistake that every port can make: the same in each kind, by the means of that kind.
"""

import os
from collections.abc import Callable
from typing import Any, NamedTuple

os.environ["KERAS_BACKEND"] = "jax"

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import keras
import numpy as np
import torch
from flax import nnx

from jax_attn import parity
from jax_attn.transfer import Layout, linear, load, row

B, T, N, H, F = 2, 5, 3, 4, 17
D = N * H
EPSILON = 1e-5
NAMES = ("norm_1", "q", "k", "v", "out", "norm_2", "up", "down")

BUGS = (
    "scale",
    "no mask",
    "mask one key too far",
    "epsilon",
    "tanh gelu",
    "relu",
    "heads interleaved",
    "keys for values",
    "no residual",
    "norm after",
    "transposed weight",
    "reversed bias",
)


class TorchBlock(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = torch.nn.LayerNorm(D, EPSILON), torch.nn.LayerNorm(D, EPSILON)
        self.q, self.k, self.v, self.out = (torch.nn.Linear(D, D) for _ in range(4))
        self.up, self.down = torch.nn.Linear(D, F), torch.nn.Linear(F, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm_1(x)
        q, k, v = (p(y).unflatten(-1, (N, H)).transpose(1, 2) for p in (self.q, self.k, self.v))
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm_2(x))))


def block(layers: Any, x_BTD: Any, bug: str) -> Any:
    """The block, of layers of any kind: each a function of (…, features), by name."""
    y = layers["norm_1"](x_BTD)
    q, k, v = (layers[name](y) for name in ("q", "k", "v"))
    v = k if bug == "keys for values" else v
    x_BTD = x_BTD + layers["out"](attend(q, k, v, bug))
    y = layers["norm_2"](x_BTD)
    hidden = layers["up"](x_BTD if bug == "norm after" else y)
    hidden = {"relu": jax.nn.relu, "tanh gelu": jax.nn.gelu}.get(
        bug, lambda h: jax.nn.gelu(h, approximate=False)
    )(hidden)
    y = layers["down"](hidden)
    return y if bug == "no residual" else x_BTD + y


def attend(q: Any, k: Any, v: Any, bug: str) -> Any:
    """Attention of (B, T, N·H), with each head's features in sequence."""
    shape, order = (
        ((B, T, H, N), "BTHN->BTNH")
        if bug == "heads interleaved"
        else (
            (B, T, N, H),
            "BTNH->BTNH",
        )
    )
    q, k, v = (jnp.einsum(order, x.reshape(shape)) for x in (q, k, v))
    scores = jnp.einsum("BTNH,BSNH->BNTS", q, k) / (H if bug == "scale" else H**0.5)
    further = {"no mask": T, "mask one key too far": 1}.get(bug, 0)
    seen = jnp.arange(T)[:, None] + further >= jnp.arange(T)
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
    return jnp.einsum("BNTS,BSNH->BTNH", weights, v).reshape(B, T, D)


def epsilon(name: str, bug: str) -> float:
    return 1e-3 if bug == "epsilon" and name == "norm_2" else EPSILON


def sizes(name: str) -> tuple[int, int]:
    return {"up": (D, F), "down": (F, D)}.get(name, (D, D))


class NnxBlock(nnx.Module):
    def __init__(self, bug: str) -> None:
        self.bug = bug
        for name in NAMES:
            layer = (
                nnx.LayerNorm(
                    D, epsilon=epsilon(name, bug), use_fast_variance=False, rngs=nnx.Rngs(0)
                )
                if name.startswith("norm")
                else nnx.Linear(*sizes(name), rngs=nnx.Rngs(0))
            )
            setattr(self, name, layer)

    def __call__(self, x: jax.Array) -> jax.Array:
        return block({name: getattr(self, name) for name in NAMES}, x, self.bug)


class EquinoxBlock(eqx.Module):
    layers: dict[str, eqx.Module]
    bug: str = eqx.field(static=True)

    def __init__(self, bug: str) -> None:
        self.bug = bug
        self.layers = {
            name: eqx.nn.LayerNorm(D, eps=epsilon(name, bug))
            if name.startswith("norm")
            else eqx.nn.Linear(*sizes(name), key=jax.random.key(0))
            for name in NAMES
        }

    def __call__(self, x: jax.Array) -> jax.Array:
        layers = {name: jax.vmap(jax.vmap(layer)) for name, layer in self.layers.items()}
        return block(layers, x, self.bug)


class LinenBlock(nn.Module):
    bug: str

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        layers = {
            name: nn.LayerNorm(epsilon=epsilon(name, self.bug), use_fast_variance=False, name=name)
            if name.startswith("norm")
            else nn.Dense(sizes(name)[1], name=name)
            for name in NAMES
        }
        return block(layers, x, self.bug)


class KerasBlock(keras.Model):
    def __init__(self, bug: str) -> None:
        super().__init__()
        self.bug = bug
        self.by_name = {
            name: keras.layers.LayerNormalization(epsilon=epsilon(name, bug), name=name)
            if name.startswith("norm")
            else keras.layers.Dense(sizes(name)[1], name=name)
            for name in NAMES
        }
        self(np.zeros((B, T, D), np.float32))

    def call(self, x: jax.Array) -> jax.Array:
        return block(self.by_name, x, self.bug)


def function_block(bug: str) -> Any:
    def apply(parameters: Any, x: jax.Array) -> jax.Array:
        def norm(name: str, x: jax.Array) -> jax.Array:
            centered = x - x.mean(-1, keepdims=True)
            variance = (centered**2).mean(-1, keepdims=True)
            normed = centered / jnp.sqrt(variance + epsilon(name, bug))
            return normed * parameters[name]["w"] + parameters[name]["b"]

        def dense(name: str, x: jax.Array) -> jax.Array:
            return x @ parameters[name]["w"] + parameters[name]["b"]

        def layer(name: str) -> Callable[[jax.Array], jax.Array]:
            return lambda x: (norm if name.startswith("norm") else dense)(name, x)

        return block({name: layer(name) for name in NAMES}, x, bug)

    def of(name: str) -> dict[str, Any]:
        shape = (D,) if name.startswith("norm") else sizes(name)
        return {"w": jnp.zeros(shape), "b": jnp.zeros(shape[-1])}

    return parity.function(apply, {name: of(name) for name in NAMES})


class KindOfPort(NamedTuple):
    """make: (bug) -> a port with weights of its own. layout: its table."""

    make: Callable[[str], Any]
    layout: Layout


def _layout(stem: str, matrix: str, bias: str, norm: tuple[str, str], *steps: Any) -> Layout:
    rows = []
    for name in NAMES:
        leaves = norm if name.startswith("norm") else (matrix, bias)
        own = () if name.startswith("norm") else steps
        rows.append(row(f"{name}.weight", f"{stem}{name}.{leaves[0]}", *own))
        rows.append(row(f"{name}.bias", f"{stem}{name}.{leaves[1]}"))
    return Layout(*rows)


def _linen(bug: str) -> tuple[LinenBlock, Any]:
    module = LinenBlock(bug)
    return module, module.init(jax.random.key(0), jnp.zeros((B, T, D)))


KINDS = {
    "nnx": KindOfPort(NnxBlock, _layout("", "kernel", "bias", ("scale", "bias"), linear)),
    "equinox": KindOfPort(EquinoxBlock, _layout("layers.", "weight", "bias", ("weight", "bias"))),
    "linen": KindOfPort(_linen, _layout("", "kernel", "bias", ("scale", "bias"), linear)),
    "keras": KindOfPort(KerasBlock, _layout("", "kernel", "bias", ("gamma", "beta"), linear)),
    "function": KindOfPort(function_block, _layout("", "w", "b", ("w", "b"), linear)),
}


def reference() -> TorchBlock:
    """The block in torch, no bias of which is 0 and no scale of which is 1."""
    torch.manual_seed(0)
    module = TorchBlock().eval()
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return module


def inputs() -> tuple[np.ndarray, ...]:
    return (np.random.default_rng(0).standard_normal((B, T, D)).astype(np.float32),)


def port(kind: str, module: torch.nn.Module, bug: str = "") -> Any:
    """The port of a kind with the weights of `module`."""
    make, layout = KINDS[kind]
    tensors = dict(module.state_dict())
    if bug == "transposed weight":
        tensors["out.weight"] = tensors["out.weight"].T
    if bug == "reversed bias":
        tensors["up.bias"] = tensors["up.bias"].flip(0)
    made = make(bug)
    loaded = load(made, tensors, layout)
    return made if kind == "nnx" else loaded
