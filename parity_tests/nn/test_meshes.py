"""Attention layers on eight devices: equal to one, with the communication of theory."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import P

from helpers.attention.meshes import KINDS, collectives, mesh, placed
from jax_attn.attention.checks import ArgumentError
from jax_attn.nn import GroupedQueryAttention

pytestmark = pytest.mark.filterwarnings("error")
B, T, D, N, H = 4, 7, 24, 8, 3
KERNELS = ("blocked", "dense")
ON_MESH = {"heads": "heads", "embed": "rows"}


def layer(K=4, **options):
    return GroupedQueryAttention(D, N, K, head_dim=H, rngs=nnx.Rngs(3), **options)


def inputs(seed=0):
    return np.random.default_rng(seed).standard_normal((B, T, D)).astype(np.float32)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("K", [8, 4, 2, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_whose_heads_are_cut_has_one_all_reduce(kind, K, kernel):
    wanted, x = layer(K)(inputs(), is_causal=True), inputs()
    on = mesh(kind, rows=2, heads=4)
    with jax.set_mesh(on):
        module = layer(K, sharding={"heads": "heads"}, implementation=kernel)
        (x,) = placed(on, [x], [P("rows")])
        run = jax.jit(lambda state, x: nnx.merge(graph, state)(x, is_causal=True))
        graph, state = nnx.split(module)
        program = run.lower(state, x).compile()
        assert collectives(program) == {"all-reduce": 1}
        found = program(state, x)
        assert found.sharding.spec[0] == "rows"
        np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_training_step_is_that_of_one_device(kind):
    def step(module, optimizer, x):
        def loss(module):
            return (module(x, is_causal=True) ** 2).mean()

        value, grads = nnx.value_and_grad(loss)(module)
        optimizer.update(module, grads)
        return value

    def trained(module, x):
        optimizer = nnx.Optimizer(module, optax.sgd(0.3, momentum=0.9), wrt=nnx.Param)
        losses = [nnx.jit(step)(module, optimizer, x) for _ in range(3)]
        return [float(value) for value in losses], nnx.state(module, nnx.Param)

    losses, wanted = trained(layer(), inputs())
    on = mesh(kind, rows=2, heads=4)
    with jax.set_mesh(on):
        module = layer(sharding=ON_MESH)
        (x,) = placed(on, [inputs()], [P("rows")])
        found_losses, found = trained(module, x)
    np.testing.assert_allclose(found_losses, losses, rtol=1e-5)
    specs = nnx.to_flat_state(nnx.get_partition_spec(found))
    rows = zip(nnx.to_flat_state(found), nnx.to_flat_state(wanted), specs, strict=True)
    for (path, a), (_, b), (_, spec) in rows:
        at = jax.sharding.NamedSharding(on, spec.get_value())
        assert a.get_value().sharding.is_equivalent_to(at, a.ndim), path
        np.testing.assert_allclose(a.get_value(), b.get_value(), rtol=0, atol=3e-5)


def test_without_a_mesh_the_names_are_kept_and_nothing_else_changes():
    plain, named = layer(), layer(sharding=ON_MESH)
    assert (plain(inputs()) == named(inputs())).all()
    specs = nnx.get_partition_spec(nnx.state(named, nnx.Param))
    assert specs["q_proj"]["kernel"].get_value() == P("rows", "heads", None)
    assert specs["k_proj"]["bias"].get_value() == P("heads", None)
    assert specs["out_proj"]["kernel"].get_value() == P("heads", None, "rows")
    assert specs["out_proj"]["bias"].get_value() == P("rows")


def test_logical_names_are_read_by_flax_rules():
    with jax.set_mesh(mesh("auto", rows=2, heads=4)), nnx.logical_axis_rules([("n", "heads")]):
        kernel = layer(K=2, sharding={"heads": "n"}).q_proj.kernel
        assert kernel.get_value().sharding.spec == P(None, "heads", None)


def test_parameters_placed_by_hand_are_enough():
    wanted, on = layer()(inputs()), mesh("explicit", rows=2, heads=4)
    module = layer()
    cuts = {3: P(None, "heads"), 2: P("heads"), 1: P()}
    for path, variable in nnx.to_flat_state(nnx.state(module, nnx.Param)):
        at = P("heads") if path[0] == "out_proj" and path[1] == "kernel" else cuts[variable.ndim]
        (value,) = placed(on, [variable.get_value()], [at])
        variable.set_value(value)
    nnx.update(module, nnx.state(module, nnx.Param))
    (x,) = placed(on, [inputs()], [P("rows")])
    np.testing.assert_allclose(nnx.jit(lambda m, x: m(x))(module, x), wanted, rtol=0, atol=2e-6)


BAD = {
    "no dict": (
        "tp",
        "sharding: expected a dict of embed, heads, kv_heads, head_dim, got str 'tp'",
    ),
    "no axis": ({"hedas": "heads"}, "got 'hedas'"),
    "no name": ({"heads": 3}, "sharding['heads']: expected a name of an axis of the mesh"),
    "not in the mesh": ({"heads": "tp"}, "axes of the mesh ('rows', 'heads'), got ['tp']"),
    "does not divide": ({"head_dim": "rows"}, "what divides head_dim = 3, got 'rows', 2 parts"),
    "kv_heads that do not divide": ({"kv_heads": ("rows", "heads")}, "what divides kv_heads = 4"),
    "twice": ({"heads": "heads", "embed": "heads"}, "expected 'heads' once in a parameter"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_sharding_that_cannot_be_is_refused(name):
    sharding, text = BAD[name]
    with jax.set_mesh(mesh("auto", rows=2, heads=4)), pytest.raises(ArgumentError) as told:
        layer(sharding=sharding)
    assert text in str(told.value)


def test_a_mesh_of_mixed_axes_is_refused():
    kinds = (jax.sharding.AxisType.Explicit, jax.sharding.AxisType.Auto)
    on = jax.make_mesh((2, 4), ("rows", "heads"), kinds)
    (x,) = placed(on, [jnp.ones((B, T, D))], [P("rows")])
    with pytest.raises(ArgumentError, match="all Explicit, or all Auto"):
        layer()(x)
