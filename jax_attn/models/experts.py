"""A mixture of experts: several MLPs, of which a router chooses some for each token.

Letters: X experts, k of them for each token, D embed_dim, F the width of an expert.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jax_attn.attention import meshes
from jax_attn.attention.broadcasting import broadcasting
from jax_attn.families.traits import ExpertTraits, MLPTraits
from jax_attn.models.mlp import dense, gated
from jax_attn.nn.projection import torch_bias_init, torch_linear_init

_FEW = 4
"""The kernels of chosen experts are gathered if they are at most one in so many."""


class Routes(NamedTuple):
    """The experts of each token, and the weights of their outputs.

    Attributes:
      chosen: (*rows, k), the numbers of the experts, the likeliest first.
      weights: (*rows, k), float32, or float64 if the logits are.
    """

    chosen: Int[Array, "*rows k"]
    weights: Float[Array, "*rows k"]


class ExpertLayer(NamedTuple):
    """One layer of all experts: x·kernel + bias, without a bias if that is None."""

    kernel: Float[Array, "X fan_in fan_out"]
    bias: Float[Array, "X fan_out"] | None = None


class ExpertLayers(NamedTuple):
    """The layers of all experts; `gate` and `up` are (D → F), `down` is (F → D)."""

    gate: ExpertLayer
    up: ExpertLayer
    down: ExpertLayer


@broadcasting
def routed(logits: Float[Array, "*rows X"], traits: ExpertTraits) -> Routes:
    """Return the experts of the largest probabilities, as transformers' routers choose them.

    Normalized probabilities are also the softmax over the chosen logits alone, as in gpt-oss.
    """
    wide = jnp.float64 if logits.dtype == jnp.float64 else jnp.float32
    weights, chosen = jax.lax.top_k(jax.nn.softmax(logits.astype(wide)), traits.chosen)
    if traits.are_normalized:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    return Routes(chosen, weights)


@broadcasting
def mixed(
    x: Float[Array, "*rows D"], routes: Routes, layers: ExpertLayers, traits: MLPTraits
) -> Float[Array, "*rows D"]:
    """Return the weighted sum of the outputs of each token's experts, in x's dtype.

    On a GPU or TPU, rows are grouped by expert, and `jax.lax.ragged_dot` multiplies each group with
    its kernel. XLA:CPU would multiply every row with every kernel for that. So on a CPU, and in a
    mesh, all experts are computed, and those that were not chosen count 0. For few tokens on one
    device, the kernels of their experts are gathered.
    """
    everywhere = partial(_all_experts, traits=traits)
    if (mesh := meshes.explicit_mesh((x, layers))) is not None:
        # XLA shards what is inside: if kernels are sharded by expert, each device computes its own.
        sharding = NamedSharding(mesh, jax.typeof(x).sharding.spec)
        return jax.sharding.auto_axes(everywhere, out_sharding=sharding)(x, routes, layers)
    if meshes.in_auto_mesh((x, layers)):
        return everywhere(x, routes, layers)
    if routes.chosen.size * _FEW <= layers.gate.kernel.shape[0]:
        return _chosen_experts(x, routes, layers, traits)
    grouped = partial(_grouped, traits=traits)
    return jax.lax.platform_dependent(x, routes, layers, cpu=everywhere, default=grouped)


def _all_experts(
    x: jax.Array, routes: Routes, layers: ExpertLayers, traits: MLPTraits
) -> jax.Array:
    """Compute `mixed` by all experts, with a weight of 0 for those that a token does not choose."""
    X, wide = layers.gate.kernel.shape[0], routes.weights.dtype
    is_chosen = jax.nn.one_hot(routes.chosen, X, dtype=wide)  # (*rows, k, X)
    weights = (is_chosen * routes.weights[..., None]).sum(axis=-2)
    # What overflows in an expert that is not chosen would be NaN times 0.
    counts = is_chosen.any(axis=-2)[..., None]
    gate, up = (
        jnp.where(counts, _plus(jnp.einsum("...d,xdf->...xf", x, layer.kernel), layer.bias), 0)
        for layer in (layers.gate, layers.up)
    )
    hidden = gated(gate, up, traits).astype(wide) * weights[..., None]
    out = jnp.einsum("...xf,xfd->...d", hidden.astype(x.dtype), layers.down.kernel)
    if layers.down.bias is None:
        return out
    bias = jnp.einsum("...x,xd->...d", weights, layers.down.bias.astype(wide))
    return (out.astype(wide) + bias).astype(x.dtype)


def _chosen_experts(
    x: jax.Array, routes: Routes, layers: ExpertLayers, traits: MLPTraits
) -> jax.Array:
    """Compute `mixed` by layers gathered for each token."""
    layers = jax.tree.map(lambda stack: stack[routes.chosen], layers)
    gate, up = (
        _plus(jnp.einsum("...d,...kdf->...kf", x, layer.kernel), layer.bias)
        for layer in (layers.gate, layers.up)
    )
    out = jnp.einsum("...kf,...kfd->...kd", gated(gate, up, traits), layers.down.kernel)
    return _summed(_plus(out, layers.down.bias), routes.weights).astype(x.dtype)


def _grouped(x: jax.Array, routes: Routes, layers: ExpertLayers, traits: MLPTraits) -> jax.Array:
    """Compute `mixed` by one product for each kernel, with the rows in the order of experts."""
    X, (*rows, k) = layers.gate.kernel.shape[0], routes.chosen.shape
    chosen = routes.chosen.reshape(-1)
    order = jnp.argsort(chosen)
    sizes = jnp.bincount(chosen, length=X)
    # JAX maps a ragged_dot along the first axis of all operands or of none. By this choice, which
    # is none to XLA, a vmap over the rows is one over the kernels, too.
    layers = jax.tree.map(lambda stack: jnp.where(sizes[0] >= 0, stack, stack), layers)

    def computed(x: jax.Array, layer: ExpertLayer) -> jax.Array:
        bias = None if layer.bias is None else layer.bias[chosen[order]]
        return _plus(jax.lax.ragged_dot(x, layer.kernel, sizes), bias)

    read = x.reshape(-1, x.shape[-1])[order // k]
    gate, up = (computed(read, layer) for layer in (layers.gate, layers.up))
    out = computed(gated(gate, up, traits), layers.down)
    out = jnp.zeros_like(out).at[order].set(out, unique_indices=True)
    return _summed(out.reshape(*rows, k, -1), routes.weights).astype(x.dtype)


def _plus(y: Float[Array, "*rows F"], bias: Array | None) -> Float[Array, "*rows F"]:
    """Return y + bias in y's dtype, added at least in float32, as in `jax_attn.nn`'s layers."""
    if bias is None:
        return y
    wide = jnp.float64 if y.dtype == jnp.float64 else jnp.float32
    return (y.astype(wide) + bias.astype(wide)).astype(y.dtype)


def _summed(out: Float[Array, "*rows k D"], weights: Float[Array, "*rows k"]) -> jax.Array:
    return (out.astype(weights.dtype) * weights[..., None]).sum(axis=-2)


class StackedLinear(nnx.Module):
    """A linear layer of each expert: kernels (X, fan_in, fan_out), and biases if use_bias."""

    def __init__(
        self,
        count: int,
        fan_in: int,
        fan_out: int,
        *,
        use_bias: bool,
        param_dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        shape, dtype = (fan_in, fan_out), jnp.dtype(param_dtype)
        keys = jax.random.split(rngs.params(), count)
        self.kernel = nnx.Param(jax.vmap(lambda key: torch_linear_init(key, shape, dtype))(keys))
        self.bias: Any = nnx.data(None)
        if use_bias:
            drawn = torch_bias_init(fan_in)(rngs.params(), (count, fan_out), dtype)
            self.bias = nnx.Param(drawn)

    def layer(self, dtype: DTypeLike) -> ExpertLayer:
        """Return the parameters in this dtype."""
        bias = None if self.bias is None else self.bias[...].astype(dtype)
        return ExpertLayer(self.kernel[...].astype(dtype), bias)


class StackedLayers(nnx.Module):
    """The layers of all experts."""

    def __init__(self, count: int, embed_dim: int, width: int, **options: Any):
        self.gate = StackedLinear(count, embed_dim, width, **options)
        self.up = StackedLinear(count, embed_dim, width, **options)
        self.down = StackedLinear(count, width, embed_dim, **options)

    def layers(self, dtype: DTypeLike) -> ExpertLayers:
        """Return their parameters in this dtype."""
        return ExpertLayers(*(each.layer(dtype) for each in (self.gate, self.up, self.down)))


class Experts(nnx.Module):
    """A router and its experts, (…, D) → (…, D)."""

    def __init__(
        self,
        embed_dim: int,
        traits: MLPTraits,
        *,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        assert traits.experts is not None
        options: Any = {"use_bias": traits.use_bias, "param_dtype": param_dtype, "rngs": rngs}
        self.traits, self.routing = traits, traits.experts
        count = traits.experts.number
        self.router = dense(embed_dim, count, dtype=dtype, **options)
        self.experts = StackedLayers(count, embed_dim, traits.width, **options)

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        logits = self.router(x)
        routes, layers = routed(logits, self.routing), self.experts.layers(logits.dtype)
        return mixed(x.astype(logits.dtype), routes, layers, self.traits)
