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
from jax_attn.models.mlp import activated, dense
from jax_attn.nn.projection import torch_linear_init

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


class Kernels(NamedTuple):
    """The kernels of all experts."""

    gate: Float[Array, "X D F"]
    up: Float[Array, "X D F"]
    down: Float[Array, "X F D"]


@broadcasting
def routed(logits: Float[Array, "*rows X"], traits: ExpertTraits) -> Routes:
    """Return the experts of the largest probabilities, as transformers' routers choose them."""
    wide = jnp.float64 if logits.dtype == jnp.float64 else jnp.float32
    weights, chosen = jax.lax.top_k(jax.nn.softmax(logits.astype(wide)), traits.chosen)
    if traits.are_normalized:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    return Routes(chosen, weights)


@broadcasting
def mixed(
    x: Float[Array, "*rows D"], routes: Routes, kernels: Kernels, activation: str
) -> Float[Array, "*rows D"]:
    """Return the weighted sum of the outputs of each token's experts, in x's dtype.

    On a GPU or TPU, rows are grouped by expert, and `jax.lax.ragged_dot` multiplies each group with
    its kernel. XLA:CPU would multiply every row with every kernel for that. So on a CPU, and in a
    mesh, all experts are computed, and those that were not chosen count 0. For few tokens on one
    device, the kernels of their experts are gathered.
    """
    everywhere = partial(_all_experts, activation=activation)
    if (mesh := meshes.explicit_mesh((x, kernels))) is not None:
        # XLA shards what is inside: if kernels are sharded by expert, each device computes its own.
        sharding = NamedSharding(mesh, jax.typeof(x).sharding.spec)
        return jax.sharding.auto_axes(everywhere, out_sharding=sharding)(x, routes, kernels)
    if meshes.in_auto_mesh((x, kernels)):
        return everywhere(x, routes, kernels)
    if routes.chosen.size * _FEW <= kernels.gate.shape[0]:
        return _chosen_experts(x, routes, kernels, activation)
    grouped = partial(_grouped, activation=activation)
    return jax.lax.platform_dependent(x, routes, kernels, cpu=everywhere, default=grouped)


def _all_experts(x: jax.Array, routes: Routes, kernels: Kernels, activation: str) -> jax.Array:
    """Compute `mixed` by all experts, with a weight of 0 for those that a token does not choose."""
    X, wide = kernels.gate.shape[0], routes.weights.dtype
    is_chosen = jax.nn.one_hot(routes.chosen, X, dtype=wide)  # (*rows, k, X)
    weights = (is_chosen * routes.weights[..., None]).sum(axis=-2)
    # What overflows in an expert that is not chosen would be NaN times 0.
    counts = is_chosen.any(axis=-2)[..., None]
    gate, up = (
        jnp.where(counts, jnp.einsum("...d,xdf->...xf", x, kernel), 0)
        for kernel in (kernels.gate, kernels.up)
    )
    hidden = (activated(gate, activation) * up).astype(wide) * weights[..., None]
    return jnp.einsum("...xf,xfd->...d", hidden.astype(x.dtype), kernels.down)


def _chosen_experts(x: jax.Array, routes: Routes, kernels: Kernels, activation: str) -> jax.Array:
    """Compute `mixed` by kernels gathered for each token."""
    gate, up, down = (kernel[routes.chosen] for kernel in kernels)
    gate, up = (jnp.einsum("...d,...kdf->...kf", x, kernel) for kernel in (gate, up))
    out = jnp.einsum("...kf,...kfd->...kd", activated(gate, activation) * up, down)
    return _summed(out, routes.weights).astype(x.dtype)


def _grouped(x: jax.Array, routes: Routes, kernels: Kernels, activation: str) -> jax.Array:
    """Compute `mixed` by one product for each kernel, with the rows in the order of experts."""
    X, (*rows, k) = kernels.gate.shape[0], routes.chosen.shape
    chosen = routes.chosen.reshape(-1)
    order = jnp.argsort(chosen)
    sizes = jnp.bincount(chosen, length=X)
    # JAX maps a ragged_dot along the first axis of all operands or of none. By this choice, which
    # is none to XLA, a vmap over the rows is one over the kernels, too.
    kernels = jax.tree.map(lambda kernel: jnp.where(sizes[0] >= 0, kernel, kernel), kernels)
    read = x.reshape(-1, x.shape[-1])[order // k]
    gate, up = (jax.lax.ragged_dot(read, kernel, sizes) for kernel in (kernels.gate, kernels.up))
    out = jax.lax.ragged_dot(activated(gate, activation) * up, kernels.down, sizes)
    out = jnp.zeros_like(out).at[order].set(out, unique_indices=True)
    return _summed(out.reshape(*rows, k, -1), routes.weights).astype(x.dtype)


def _summed(out: Float[Array, "*rows k D"], weights: Float[Array, "*rows k"]) -> jax.Array:
    return (out.astype(weights.dtype) * weights[..., None]).sum(axis=-2)


class StackedKernel(nnx.Module):
    """The kernels (X, fan_in, fan_out) of a linear layer of each expert."""

    def __init__(
        self, count: int, fan_in: int, fan_out: int, param_dtype: DTypeLike, rngs: nnx.Rngs
    ):
        shape, dtype = (fan_in, fan_out), jnp.dtype(param_dtype)
        keys = jax.random.split(rngs.params(), count)
        self.kernel = nnx.Param(jax.vmap(lambda key: torch_linear_init(key, shape, dtype))(keys))


class StackedKernels(nnx.Module):
    """The layers of all experts."""

    def __init__(self, count: int, embed_dim: int, width: int, **options: Any):
        self.gate = StackedKernel(count, embed_dim, width, **options)
        self.up = StackedKernel(count, embed_dim, width, **options)
        self.down = StackedKernel(count, width, embed_dim, **options)

    def kernels(self, dtype: DTypeLike) -> Kernels:
        """Return the kernels in this dtype."""
        return Kernels(*(s.kernel[...].astype(dtype) for s in (self.gate, self.up, self.down)))


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
        options: Any = {"param_dtype": param_dtype, "rngs": rngs}
        self.routing, self.activation = traits.experts, traits.activation
        count = traits.experts.number
        self.router = dense(embed_dim, count, use_bias=False, dtype=dtype, **options)
        self.experts = StackedKernels(count, embed_dim, traits.width, **options)

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        logits = self.router(x)
        routes, kernels = routed(logits, self.routing), self.experts.kernels(logits.dtype)
        return mixed(x.astype(logits.dtype), routes, kernels, self.activation)
