"""Mixtures of experts: three ways to compute them, ties, and what routers choose."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.sharding import NamedSharding

from helpers.attention.meshes import mesh
from jax_attn.families.traits import ExpertTraits
from jax_attn.models import experts
from jax_attn.models.experts import Kernels, Routes, mixed, routed

pytestmark = pytest.mark.filterwarnings("error")
ROWS, T, X, CHOSEN, D, F = 2, 7, 8, 3, 5, 11
TRAITS = ExpertTraits(X, CHOSEN, are_normalized=True)
WAYS = {
    "all experts": partial(experts._all_experts, activation="silu"),
    "chosen experts": partial(experts._chosen_experts, activation="silu"),
    "groups": partial(experts._grouped, activation="silu"),
    "as on this machine": partial(mixed, activation="silu"),
}
# One expert has no token, and one has many.
LEAN = np.array([3.0, 0, 0, 0, 0, 0, 0, -9])
BOUND = 64 * np.finfo(np.float64).eps


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def drawn(*rows):
    rng = np.random.default_rng(0)
    x, logits = rng.normal(size=(*rows, D)), rng.normal(size=(*rows, X)) + LEAN
    kernels = Kernels(*(rng.normal(size=s) for s in ((X, D, F), (X, D, F), (X, F, D))))
    return jax.tree.map(jnp.asarray, (x, logits, kernels))


def one_by_one(x, logits, kernels):
    """In NumPy: each token, its likeliest experts, their outputs by their probabilities."""
    out = np.zeros_like(x)
    for place in np.ndindex(x.shape[:-1]):
        p = np.exp(logits[place]) / np.exp(logits[place]).sum()
        chosen = np.argsort(-p)[:CHOSEN]
        for e in chosen:
            gate, up = (x[place] @ kernel[e] for kernel in kernels[:2])
            out[place] += p[e] / p[chosen].sum() * (gate / (1 + np.exp(-gate)) * up) @ kernels[2][e]
    return out


@pytest.mark.parametrize("rows", [(ROWS, T), (1,)], ids=["many tokens", "one"])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_gives_the_sum_over_the_chosen_experts(way, rows):
    x, logits, kernels = drawn(*rows)
    wanted = one_by_one(*jax.tree.map(np.asarray, (x, logits, kernels)))
    found = jax.jit(WAYS[way])(x, routed(logits, TRAITS), kernels)
    assert np.abs(found - wanted).max() < BOUND * np.abs(wanted).max()


@pytest.mark.parametrize("of_each", [False, True], ids=["of all examples", "of each"])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_has_the_same_gradients(way, of_each):
    """Those of each example by a vmap over the rows and not over the kernels, under jit."""
    x, logits, kernels = drawn(ROWS, T)

    def total(way, x, logits, kernels):
        return jnp.sin(way(x, routed(logits, TRAITS), kernels)).sum()

    def gradients(way):
        gradient = jax.grad(partial(total, way), argnums=(0, 1, 2))
        mapped = jax.vmap(gradient, in_axes=(0, 0, None)) if of_each else gradient
        return jax.jit(mapped)(x, logits, kernels)

    wanted = gradients(WAYS["all experts"])
    for a, b in zip(*map(jax.tree.leaves, (gradients(WAYS[way]), wanted)), strict=True):
        assert np.abs(a - b).max() <= T * BOUND * np.abs(b).max()
    assert not np.asarray(wanted[2].down[..., -1, :, :]).any()  # of the expert that has no token
    assert all(np.asarray(kernel[..., 0, :, :]).any() for kernel in wanted[2])


@pytest.mark.parametrize("platform", ["cpu", "tpu", "cuda"])
def test_a_gpu_and_a_tpu_multiply_groups_of_rows(platform):
    """Lowered for each; nothing is run."""
    with jax.enable_x64(False):
        x, logits, kernels = jax.tree.map(lambda a: a.astype(jnp.float32), drawn(ROWS, T))
        traced = jax.jit(WAYS["as on this machine"]).trace(x, routed(logits, TRAITS), kernels)
        program = traced.lower(lowering_platforms=(platform,)).as_text()
    assert ("ragged_dot" in program) == (platform != "cpu")


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_in_a_mesh_each_device_has_its_own_experts(kind):
    x, logits, kernels = drawn(4, T)
    on = mesh(kind, rows=2, heads=4)
    place = lambda tree, cut: jax.device_put(tree, NamedSharding(on, cut))  # noqa: E731
    routes = routed(logits, TRAITS)
    with jax.set_mesh(on):
        program = jax.jit(partial(mixed, activation="silu")).lower(
            place(x, P("rows")), place(routes, P("rows")), place(kernels, P("heads"))
        )
        compiled = program.compile()
        found = compiled(place(x, P("rows")), place(routes, P("rows")), place(kernels, P("heads")))
    wanted = one_by_one(*jax.tree.map(np.asarray, (x, logits, kernels)))
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
def test_weights_are_wide_and_the_result_is_not(dtype):
    x, logits, kernels = jax.tree.map(lambda a: a.astype(dtype), drawn(ROWS, T))
    routes = routed(logits, TRAITS)
    assert routes.weights.dtype == jnp.float32
    for way in WAYS.values():
        assert way(x, routes, kernels).dtype == dtype


def test_a_token_that_is_not_finite_spoils_no_other():
    x, logits, kernels = drawn(ROWS, T)
    spoiled = x.at[0, 2].set(jnp.nan)
    for way in WAYS.values():
        found = way(spoiled, Routes(*routed(logits, TRAITS)), kernels)
        assert np.isfinite(np.asarray(found)).all(axis=-1).sum() == ROWS * T - 1


def test_what_overflows_in_an_expert_that_is_not_chosen_spoils_nothing():
    """Neither the outputs nor a gradient, whichever way; transformers never computes it."""
    x, _, kernels = drawn(ROWS, T)
    logits = jnp.broadcast_to(jnp.arange(len(kernels.gate), 0.0, -1), (ROWS, T, len(kernels.gate)))
    large = kernels._replace(**{k: getattr(kernels, k).at[-1].mul(2e3) for k in ("gate", "up")})
    x, logits, large = jax.tree.map(lambda a: a.astype(jnp.float16), (x, logits, large))
    assert np.isinf(x @ large.gate[-1] * (x @ large.up[-1])).any()

    def total(way, *arrays):
        x, logits, kernels = arrays
        return way(x, routed(logits, TRAITS), kernels).astype(jnp.float32).sum()

    for way in WAYS.values():
        grads = jax.grad(partial(total, way), argnums=(0, 1, 2))(x, logits, large)
        assert all(np.isfinite(a).all() for a in jax.tree.leaves(grads))
        assert np.isfinite(total(way, x, logits, large))
