"""A port made of a function and torch's own weights, and the steps that its models share.

Each model of these helpers is one function of JAX, right as it stands; a name in `wrong` plants one
mistake in it. Weights keep torch's names and layout, so that one table serves them all.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from jax_attn import parity
from jax_attn.transfer import Layout, row

LOWEST = float(np.finfo(np.float32).min)


def flat(name: str) -> str:
    return name.replace(".", "__")


class Port(nnx.Module):
    """forward: (port, **inputs) -> outputs. wrong: the mistakes that it makes, joined by " + "."""

    def __init__(self, reference: torch.nn.Module, forward, wrong: str = ""):
        for name, p in reference.named_parameters():
            setattr(self, flat(name), nnx.Param(jnp.array(p.detach().numpy())))
        for name, b in reference.named_buffers():
            setattr(self, flat(name), nnx.BatchStat(jnp.array(b.numpy())))
        self.forward, self.wrong = forward, frozenset(wrong.split(" + "))

    def __call__(self, *args, **inputs):
        return self.forward(self, *args, **inputs)

    def weight(self, name: str) -> jax.Array:
        return getattr(self, flat(name))[...]

    def has(self, mistake: str) -> bool:
        return mistake in self.wrong

    def linear(self, name: str, x: jax.Array) -> jax.Array:
        y = x @ self.weight(f"{name}.weight").T
        return y + self.weight(f"{name}.bias") if hasattr(self, flat(f"{name}.bias")) else y

    def embed(self, name: str, ids: jax.Array, padding: int | None = None) -> jax.Array:
        """torch gives the padding's row no gradient."""
        x = self.weight(f"{name}.weight")[ids]
        if padding is None:
            return x
        return jnp.where((ids == padding)[..., None], jax.lax.stop_gradient(x), x)

    def layer_norm(self, name: str, x: jax.Array, eps: float) -> jax.Array:
        centred = x - x.mean(-1, keepdims=True)
        normed = centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + eps)
        return normed * self.weight(f"{name}.weight") + self.weight(f"{name}.bias")

    def rms_norm(self, name: str, x: jax.Array, eps: float, offset: float = 0.0) -> jax.Array:
        normed = x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + eps)
        return normed * (offset + self.weight(f"{name}.weight"))


def table(reference: torch.nn.Module) -> Layout:
    return Layout(*[row(name, flat(name)) for name, _ in reference.named_parameters()])


@dataclass(frozen=True)
class Model:
    """A model of transformers' and its port.

    call: of the reference. given: inputs; without them, those that `suggest_inputs` makes.
    """

    make: Callable[[], torch.nn.Module]
    forward: Callable
    call: Callable | None = None
    given: dict | None = None

    @cached_property
    def reference(self) -> torch.nn.Module:
        return randomised(self.make())

    @cached_property
    def inputs(self) -> dict:
        return self.given or parity.suggest_inputs(self.reference, reference_call=self.call)

    def explain(self, wrong: str = "", *, gradients: bool = False) -> parity.Explanation:
        return parity.explain(
            self.reference,
            Port(self.reference, self.forward, wrong),
            self.inputs,
            layout=table(self.reference),
            reference_call=self.call,
            gradients=gradients,
            transforms=("jit",),
        )


def hidden(model, **inputs):
    return model(**inputs).last_hidden_state


def uncached(model, **inputs):
    return model(**inputs, use_cache=False).last_hidden_state


def split(x: jax.Array, heads: int) -> jax.Array:
    """(B, T, N·H) -> (B, N, T, H)"""
    return x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2)


def joined(x: jax.Array) -> jax.Array:
    """(B, N, T, H) -> (B, T, N·H)"""
    return x.swapaxes(1, 2).reshape(x.shape[0], x.shape[2], -1)


def masked_softmax(port: Port, scores: jax.Array, visible: jax.Array | None) -> jax.Array:
    """As transformers' eager attention: the lowest number is added where a key is hidden."""
    if visible is None:
        return jax.nn.softmax(scores, axis=-1)
    weights = jax.nn.softmax(scores + jnp.where(visible, 0.0, LOWEST), axis=-1)
    visible = jnp.broadcast_to(visible, scores.shape)
    empty = ~visible.any(-1, keepdims=True)
    if port.has("zeros in empty rows"):
        return jnp.where(empty, 0.0, weights)
    if port.has("NaN in empty rows"):
        return jnp.where(empty, jnp.nan, weights)
    if port.has("mask by -10"):
        return jax.nn.softmax(scores + jnp.where(visible, 0.0, -10.0), axis=-1)
    if port.has("mask after the softmax, not summed to 1"):
        return jax.nn.softmax(scores, axis=-1) * visible
    return weights


def randomised(module: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Weights that keep numbers near 1 in every layer; norms and biases not at their 1 and 0."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, p in module.named_parameters():
            if p.ndim > 1:
                p.copy_(
                    torch.randn_like(p)
                    * (1 if "embed" in name or "bias" in name else p.shape[-1] ** -0.5)
                )
            else:
                p.copy_(0.2 * torch.randn_like(p) + ("norm" in name.lower() and "bias" not in name))
    return module.eval()
