"""Mixtures of experts: three ways to compute them, ties, and what routers choose."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax import P
from jax.sharding import NamedSharding
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from helpers.attention.meshes import mesh
from jax_attn.families.traits import ExpertTraits, MLPTraits, SwigluTraits
from jax_attn.models import experts
from jax_attn.models.experts import ExpertLayer, ExpertLayers, Routes, mixed, routed
from jax_attn.models.mlp import clamped_swiglu

pytestmark = pytest.mark.filterwarnings("error")
ROWS, T, X, CHOSEN, D, F = 2, 7, 8, 3, 5, 11
TRAITS = ExpertTraits(X, CHOSEN, are_normalized=True)
# Many gates and ups of random numbers lie on either side of the limit.
SWIGLU = SwigluTraits(alpha=1.3, limit=1.5)
KINDS = {
    "plain": MLPTraits(F, "silu", is_gated=True, use_bias=False),
    "biases and a clamped product": MLPTraits(F, "silu", is_gated=True, swiglu=SWIGLU),
}
WAYS = {
    "all experts": experts._all_experts,
    "chosen experts": experts._chosen_experts,
    "groups": experts._grouped,
    "as on this machine": mixed,
}
# One expert has no token, and one has many.
LEAN = np.array([3.0, 0, 0, 0, 0, 0, 0, -9])
BOUND = 64 * np.finfo(np.float64).eps


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


@pytest.fixture(params=KINDS)
def traits(request):
    return KINDS[request.param]


def drawn(*rows, traits):
    rng = np.random.default_rng(0)
    x, logits = rng.normal(size=(*rows, D)), rng.normal(size=(*rows, X)) + LEAN

    def layer(*fans):
        kernel = rng.normal(size=(X, *fans))
        return ExpertLayer(kernel, rng.normal(size=(X, fans[1])) if traits.use_bias else None)

    layers = ExpertLayers(layer(D, F), layer(D, F), layer(F, D))
    return jax.tree.map(jnp.asarray, (x, logits, layers))


def one_by_one(x, logits, layers, traits):
    """In NumPy: each token, its likeliest experts, their outputs by their probabilities."""

    def through(layer, x, e):
        return x @ layer.kernel[e] + (0 if layer.bias is None else layer.bias[e])

    out = np.zeros_like(x)
    for place in np.ndindex(x.shape[:-1]):
        p = np.exp(logits[place]) / np.exp(logits[place]).sum()
        chosen = np.argsort(-p)[:CHOSEN]
        for e in chosen:
            gate, up = (through(layer, x[place], e) for layer in layers[:2])
            alpha = 1
            if traits.swiglu is not None:
                alpha, limit = traits.swiglu
                gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit) + 1
            hidden = gate / (1 + np.exp(-alpha * gate)) * up
            out[place] += p[e] / p[chosen].sum() * through(layers.down, hidden, e)
    return out


@pytest.mark.parametrize("rows", [(ROWS, T), (1,)], ids=["many tokens", "one"])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_gives_the_sum_over_the_chosen_experts(way, rows, traits):
    x, logits, layers = drawn(*rows, traits=traits)
    wanted = one_by_one(*jax.tree.map(np.asarray, (x, logits, layers)), traits)
    found = jax.jit(partial(WAYS[way], traits=traits))(x, routed(logits, TRAITS), layers)
    assert np.abs(found - wanted).max() < BOUND * np.abs(wanted).max()


@pytest.mark.parametrize("of_each", [False, True], ids=["of all examples", "of each"])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_has_the_same_gradients(way, of_each, traits):
    """Those of each example by a vmap over the rows and not over the kernels, under jit."""
    x, logits, layers = drawn(ROWS, T, traits=traits)

    def total(way, x, logits, layers):
        return jnp.sin(way(x, routed(logits, TRAITS), layers, traits)).sum()

    def gradients(way):
        gradient = jax.grad(partial(total, way), argnums=(0, 1, 2))
        mapped = jax.vmap(gradient, in_axes=(0, 0, None)) if of_each else gradient
        return jax.jit(mapped)(x, logits, layers)

    wanted = gradients(WAYS["all experts"])
    for a, b in zip(*map(jax.tree.leaves, (gradients(WAYS[way]), wanted)), strict=True):
        assert np.abs(a - b).max() <= T * BOUND * np.abs(b).max()
    # The last expert has no token.
    assert not np.asarray(wanted[2].down.kernel[..., -1, :, :]).any()
    assert all(np.asarray(layer.kernel[..., 0, :, :]).any() for layer in wanted[2])
    assert not traits.use_bias or not np.asarray(wanted[2].down.bias[..., -1, :]).any()


@pytest.mark.parametrize("platform", ["cpu", "tpu", "cuda"])
def test_a_gpu_and_a_tpu_multiply_groups_of_rows(platform, traits):
    """Lowered for each; nothing is run."""
    with jax.enable_x64(False):
        held = drawn(ROWS, T, traits=traits)
        x, logits, layers = jax.tree.map(lambda a: a.astype(jnp.float32), held)
        compiled = jax.jit(partial(mixed, traits=traits))
        traced = compiled.trace(x, routed(logits, TRAITS), layers)
        program = traced.lower(lowering_platforms=(platform,)).as_text()
    assert ("ragged_dot" in program) == (platform != "cpu")


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_in_a_mesh_each_device_has_its_own_experts(kind, traits):
    x, logits, layers = drawn(4, T, traits=traits)
    on = mesh(kind, rows=2, heads=4)
    place = lambda tree, cut: jax.device_put(tree, NamedSharding(on, cut))  # noqa: E731
    routes = routed(logits, TRAITS)
    with jax.set_mesh(on):
        program = jax.jit(partial(mixed, traits=traits)).lower(
            place(x, P("rows")), place(routes, P("rows")), place(layers, P("heads"))
        )
        compiled = program.compile()
        found = compiled(place(x, P("rows")), place(routes, P("rows")), place(layers, P("heads")))
    wanted = one_by_one(*jax.tree.map(np.asarray, (x, logits, layers)), traits)
    assert np.abs(found - wanted).max() < BOUND * np.abs(wanted).max()
    assert "all-gather" not in compiled.as_text()  # of kernels: the outputs are added up
    assert "all-reduce" in compiled.as_text()


def test_routes_are_the_likeliest_experts_by_their_probabilities():
    logits = jnp.log(jnp.asarray([[0.1, 0.5, 0.15, 0.25]]))
    for are_normalized, weights in ((False, [0.5, 0.25]), (True, [2 / 3, 1 / 3])):
        found = routed(logits, ExpertTraits(4, 2, are_normalized))
        assert found.chosen.tolist() == [[1, 3]]
        assert np.allclose(found.weights, weights, rtol=BOUND)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_are_wide_and_the_result_is_not(dtype, traits):
    held = drawn(ROWS, T, traits=traits)
    x, logits, layers = jax.tree.map(lambda a: a.astype(dtype), held)
    routes = routed(logits, TRAITS)
    assert routes.weights.dtype == jnp.float32
    for way in WAYS.values():
        assert way(x, routes, layers, traits).dtype == dtype


def test_a_token_that_is_not_finite_spoils_no_other(traits):
    x, logits, layers = drawn(ROWS, T, traits=traits)
    spoiled = x.at[0, 2].set(jnp.nan)
    for way in WAYS.values():
        found = way(spoiled, Routes(*routed(logits, TRAITS)), layers, traits)
        assert np.isfinite(np.asarray(found)).all(axis=-1).sum() == ROWS * T - 1


def test_what_overflows_in_an_expert_that_is_not_chosen_spoils_nothing(traits):
    """Neither the outputs nor a gradient, whichever way; transformers never computes it."""
    x, _, layers = drawn(ROWS, T, traits=traits)
    logits = jnp.broadcast_to(jnp.arange(X, 0.0, -1), (ROWS, T, X))
    of_last = {k: getattr(layers, k).kernel.at[-1].mul(2e4) for k in ("gate", "up")}
    large = {k: getattr(layers, k)._replace(kernel=kernel) for k, kernel in of_last.items()}
    arrays = (x, logits, layers._replace(**large))
    x, logits, large = jax.tree.map(lambda a: a.astype(jnp.float16), arrays)
    assert np.isinf(x @ large.gate.kernel[-1]).any()

    def total(way, *arrays):
        x, logits, layers = arrays
        return way(x, routed(logits, TRAITS), layers, traits).astype(jnp.float32).sum()

    for way in WAYS.values():
        grads = jax.grad(partial(total, way), argnums=(0, 1, 2))(x, logits, large)
        assert all(np.isfinite(a).all() for a in jax.tree.leaves(grads))
        assert np.isfinite(total(way, x, logits, large))


def test_values_at_the_limit_have_the_gradient_that_torch_gives_them():
    """16-bit activations meet a limit such as 7 exactly; torch's clamp keeps their gradient."""
    limit = SWIGLU.limit
    gate, up = np.meshgrid([limit, -limit, 2.0, -2.0, 0.5], [limit, -limit, 2.0, -2.0, 0.5])

    def ours(gate, up):
        return clamped_swiglu(gate, up, SWIGLU).sum()

    theirs = [torch.tensor(a, requires_grad=True) for a in (gate, up)]
    module = SimpleNamespace(alpha=SWIGLU.alpha, limit=limit)
    pairs = torch.stack(theirs, dim=-1).flatten(-2)  # gate and up take turns
    GptOssExperts._apply_gate(module, pairs).sum().backward()
    for found, a in zip(jax.grad(ours, argnums=(0, 1))(gate, up), theirs, strict=True):
        assert np.abs(found - a.grad.numpy()).max() < BOUND
        assert np.abs(found).min() == 0
