"""Attention layers on eight devices: equal to one, with the communication of theory."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import P

from helpers.attention import meshes
from helpers.attention.meshes import KINDS, collectives, mesh, placed
from jax_attn.attention import Rotary, dot_product_attention
from jax_attn.attention.checks import ArgumentError
from jax_attn.nn import GroupedQueryAttention

pytestmark = pytest.mark.filterwarnings("error")
B, T, D, N, H = 4, 7, 24, 8, 3
KERNELS = ("blocked", "dense")
ON_MESH = {"heads": "heads", "embed": "rows"}


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


# Of the sums of a layer and of its gradients: over features, heads, keys, and all tokens.
assert_near = partial(meshes.assert_near, additions=D + N * H + T + B * T)


def layer(K=4, **options):
    made = {"head_dim": H, "param_dtype": np.float64, "rngs": nnx.Rngs(3)}
    return GroupedQueryAttention(D, N, K, **made | options)


def inputs(moved=False):
    x = np.random.default_rng(0).standard_normal((B, T, D))
    return inputs_moved(x) if moved else x


def inputs_moved(x):
    """Each number by its last bit."""
    return x * (1 + 2.0**-53 * np.random.default_rng(1).choice([-2, 2], x.shape))


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("K", [8, 4, 2, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_whose_heads_are_cut_has_one_all_reduce(kind, K, kernel):
    wanted, near = (layer(K)(inputs(moved), is_causal=True) for moved in (False, True))
    on = mesh(kind, rows=2, heads=4)
    with jax.set_mesh(on):
        module = layer(K, sharding={"heads": "heads"}, implementation=kernel)
        (x,) = placed(on, [inputs()], [P("rows")])
        run = jax.jit(lambda state, x: nnx.merge(graph, state)(x, is_causal=True))
        graph, state = nnx.split(module)
        program = run.lower(state, x).compile()
        assert collectives(program) == {"all-reduce": 1}
        found = program(state, x)
        assert found.sharding.spec[0] == "rows"
    assert_near(found, wanted, near)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_training_is_that_of_one_device(kind):
    STEPS = 3

    def step(module, optimizer, x):
        def loss(module):
            return (module(x, is_causal=True) ** 2).mean()

        value, grads = nnx.value_and_grad(loss)(module)
        optimizer.update(module, grads)
        return value

    def trained(module, x):
        optimizer = nnx.Optimizer(module, optax.sgd(0.3, momentum=0.9), wrt=nnx.Param)
        losses = [nnx.jit(step)(module, optimizer, x) for _ in range(STEPS)]
        return losses, jax.tree.leaves(nnx.state(module, nnx.Param)), module

    wanted, near = (trained(layer(), jnp.asarray(inputs(m)))[:2] for m in (False, True))
    on = mesh(kind, rows=2, heads=4)
    with jax.set_mesh(on):
        (x,) = placed(on, [inputs()], [P("rows")])
        *found, module = trained(layer(sharding=ON_MESH), x)
    assert_near(found, [*wanted], [*near], passes=2 * STEPS)
    state = nnx.state(module, nnx.Param)
    specs = nnx.to_flat_state(nnx.get_partition_spec(state))
    for (path, variable), (_, spec) in zip(nnx.to_flat_state(state), specs, strict=True):
        at = jax.sharding.NamedSharding(on, spec.get_value())
        assert variable.get_value().sharding.is_equivalent_to(at, variable.ndim), path


LAYERS = {
    "dropout of the output": {"out_dropout_rate": 0.3, "sharding": {"heads": "heads"}},
    "rotary, with features cut": {"rotary": Rotary(2), "sharding": {"head_dim": "features"}},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("kind", KINDS)
def test_layers_equal_those_of_one_device(kind, name):
    options = {**LAYERS[name], "head_dim": 6}

    def run(module, x):
        return nnx.jit(lambda module, x: module(x))(module, x)

    wanted, near = (run(layer(**options), jnp.asarray(inputs(moved))) for moved in (False, True))
    on = mesh(kind, rows=2, heads=2, features=2)
    with jax.set_mesh(on):
        (x,) = placed(on, [inputs()], [P("rows")])
        assert_near(run(layer(**options), x), wanted, near)


@pytest.mark.slow
def test_without_a_mesh_the_names_are_kept_and_nothing_else_changes():
    plain, named = layer(), layer(sharding=ON_MESH)
    assert (plain(inputs()) == named(inputs())).all()
    specs = nnx.get_partition_spec(nnx.state(named, nnx.Param))
    assert specs["q_proj"]["kernel"].get_value() == P("rows", "heads", None)
    assert specs["k_proj"]["bias"].get_value() == P("heads", None)
    assert specs["out_proj"]["kernel"].get_value() == P("heads", None, "rows")
    assert specs["out_proj"]["bias"].get_value() == P("rows")


@pytest.mark.slow
def test_logical_names_are_read_by_flax_rules():
    with jax.set_mesh(mesh("auto", rows=2, heads=4)), nnx.logical_axis_rules([("n", "heads")]):
        kernel = layer(K=2, sharding={"heads": "n"}).q_proj.kernel
        assert kernel.get_value().sharding.spec == P(None, "heads", None)


@pytest.mark.slow
def test_parameters_placed_by_hand_are_enough():
    cuts = {3: P(None, "heads"), 2: P("heads"), 1: P()}
    wanted, near = (layer()(inputs(moved)) for moved in (False, True))
    module, on = layer(), mesh("explicit", rows=2, heads=4)
    state = nnx.state(module, nnx.Param)
    for path, variable in nnx.to_flat_state(state):
        at = P("heads") if path == ("out_proj", "kernel") else cuts[variable.ndim]
        variable.set_value(*placed(on, [variable.get_value()], [at]))
    nnx.update(module, state)
    assert "heads" in jax.typeof(module.out_proj.kernel.get_value()).sharding.spec
    (x,) = placed(on, [inputs()], [P("rows")])
    assert_near(nnx.jit(lambda m, x: m(x))(module, x), wanted, near)


BAD = {
    "no dict": (
        "tp",
        "sharding: expected a dict of embed, heads, kv_heads, head_dim, got str 'tp'",
    ),
    "no axis": ({"hedas": "heads"}, "got 'hedas'"),
    "no name": ({"heads": 3}, "sharding['heads']: expected the name of an axis of the mesh"),
    "not in the mesh": ({"heads": "tp"}, "axes of the mesh ('rows', 'heads'), got ['tp']"),
    "does not divide": ({"head_dim": "rows"}, "divides head_dim = 3, got 2 by 'rows'"),
    "kv_heads that do not divide": (
        {"kv_heads": ("rows", "heads")},
        "a number of parts that divides kv_heads = 4",
    ),
    "twice, in keys": (
        {"embed": "heads", "kv_heads": "heads"},
        "sharding: expected 'heads' once in a parameter, got it for ['embed', 'kv_heads']",
    ),
    "a logical name in a tuple": ({"heads": ("n", "rows")}, "('rows', 'heads'), got ['n']"),
    "twice": ({"heads": "heads", "embed": "heads"}, "expected 'heads' once in a parameter"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_sharding_that_cannot_be_is_refused(name):
    sharding, text = BAD[name]
    with (
        jax.set_mesh(mesh("auto", rows=2, heads=4)),
        nnx.logical_axis_rules([("n", "heads")]),
        pytest.raises(ArgumentError) as told,
    ):
        layer(sharding=sharding)
    assert text in str(told.value)


def test_a_mesh_of_mixed_axes_is_refused():
    kinds = (jax.sharding.AxisType.Explicit, jax.sharding.AxisType.Auto)
    on = jax.make_mesh((2, 4), ("rows", "heads"), kinds)
    (x,) = placed(on, [jnp.ones((B, T, D))], [P("rows")])
    with pytest.raises(ArgumentError, match="all Explicit, or all Auto"):
        layer()(x)
    with jax.set_mesh(on), pytest.raises(ArgumentError, match="all Explicit, or all Auto"):
        layer(sharding={"heads": "heads"})


@pytest.mark.parametrize("kind", KINDS)
def test_arrays_on_another_mesh_than_that_which_is_set_are_refused(kind):
    (x,) = placed(mesh("explicit", rows=2, heads=4), [jnp.ones((B, T, N, H))], [P("rows")])
    expected = r"mesh: expected arrays on the mesh that is set, AbstractMesh\('a': 8"
    with jax.set_mesh(mesh(kind, a=8)), pytest.raises(ArgumentError, match=expected):
        dot_product_attention(x, x, x)
