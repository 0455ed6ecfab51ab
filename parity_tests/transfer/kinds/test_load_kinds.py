"""Weights into ports of other kinds and out again: a new one of the same kind, bit for bit."""

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.sharding import NamedSharding

from helpers.attention.meshes import mesh
from helpers.parity import five_kinds
from helpers.parity.five_kinds import KINDS, eqx, keras, nn
from helpers.same_arrays import assert_same
from helpers.transfer.fresh_python import fresh_python
from jax_attn import parity, transfer
from jax_attn.transfer import Layout, TransferError, export, flatten, linear, load, row

REFERENCE = five_kinds.reference()
TENSORS = {name: a.numpy() for name, a in REFERENCE.state_dict().items()}
OTHERS = [kind for kind in KINDS if kind != "nnx"]
IN, OUT = 3, 5
WEIGHT = {"weight": np.arange(OUT * IN, dtype=np.float32).reshape(OUT, IN)}


@pytest.mark.parametrize("kind", OTHERS)
def test_what_comes_back_is_of_the_kind_that_was_handed_in(kind):
    made, layout = KINDS[kind].make(""), KINDS[kind].layout
    before = {path: np.array(a) for path, a in flatten(made).items()}
    loaded = load(made, TENSORS, layout)
    assert type(loaded) is type(made)
    assert_same(export(loaded, layout), TENSORS)
    if kind == "keras":
        assert loaded is made
    else:
        assert_same(flatten(made), before)


@pytest.mark.parametrize("kind", OTHERS)
def test_a_load_is_whole_or_nothing_and_names_paths_of_the_tree(kind):
    made, layout = KINDS[kind].make(""), KINDS[kind].layout
    before = {path: np.array(a) for path, a in flatten(made).items()}
    wrong = dict(TENSORS)
    wrong["up.bias"] = wrong["up.bias"][1:]
    del wrong["q.weight"]
    with pytest.raises(TransferError) as raised:
        load(made, wrong, layout)
    assert [(p.kind, p.name) for p in raised.value.problems] == [
        ("missing", "q.weight"),
        ("wrong shape", "up.bias"),
    ]
    assert_same(flatten(made), before)


def test_a_plan_reads_an_abstract_tree():
    module = five_kinds.LinenBlock("")
    x = jnp.zeros((five_kinds.B, five_kinds.T, five_kinds.D))
    variables = jax.eval_shape(module.init, jax.random.key(0), x)
    assert not transfer.plan((module, variables), TENSORS, KINDS["linen"].layout).problems
    _, loaded = load((module, variables), TENSORS, KINDS["linen"].layout)
    assert_same(export(loaded["params"], KINDS["linen"].layout), TENSORS)


# --- what each kind holds beside plain arrays ---


def test_a_bound_linen_module_comes_back_bound():
    module, variables = KINDS["linen"].make("")
    loaded = load(module.bind(variables), TENSORS, KINDS["linen"].layout)
    assert loaded.scope is not None
    assert_same(export(loaded.variables["params"], KINDS["linen"].layout), TENSORS)


class _Partitioned(nn.Module):
    @nn.compact
    def __call__(self, x):
        init = nn.with_partitioning(nn.initializers.zeros, ("in", "out"))
        return nn.Dense(OUT, use_bias=False, kernel_init=init, name="up")(x)


def test_metadata_of_linen_variables_stays():
    module = _Partitioned()
    variables = flax.core.freeze(module.init(jax.random.key(0), jnp.zeros((2, IN))))
    layout = Layout(row("weight", "up.kernel", linear))
    _, loaded = load((module, variables), WEIGHT, layout)
    assert loaded["params"]["up"]["kernel"].names == ("in", "out")
    assert_same(export((module, loaded), layout), WEIGHT)


class _Mixed(eqx.Module):
    layers: list
    count: jax.Array
    name: str = eqx.field(static=True)


def test_an_equinox_module_keeps_its_functions_and_integers():
    linear_layer = eqx.nn.Linear(IN, OUT, use_bias=False, key=jax.random.key(0))
    module = _Mixed([linear_layer, jax.nn.gelu, eqx.nn.Dropout(0.5)], jnp.arange(2), "a name")
    assert flatten(module).keys() == {"layers.0.weight"}
    loaded = load(module, WEIGHT, Layout(row("weight", "layers.0.weight")))
    assert (loaded.name, loaded.layers[1]) == ("a name", jax.nn.gelu)
    assert_same(
        {"weight": loaded.layers[0].weight, "count": loaded.count},
        WEIGHT | {"count": np.arange(2, dtype=np.int32)},
    )


def test_a_lone_array_is_a_tree():
    port = parity.function(lambda w, x: x @ w, jnp.zeros((IN, OUT)))
    loaded = load(port, WEIGHT, Layout(row("weight", "parameters", linear)))
    assert_same({"weight": loaded.parameters.T}, WEIGHT)


def test_arrays_stay_on_the_mesh_on_which_they_were():
    where = NamedSharding(mesh("auto", model=5), P(None, "model"))
    tree = {"up": jax.device_put(jnp.zeros((IN, OUT)), where)}
    loaded = load(tree, WEIGHT, Layout(row("weight", "up", linear)))
    assert loaded["up"].sharding == where


def test_two_arrays_of_one_path_are_refused():
    with pytest.raises(ValueError, match=r"two arrays .*'a\.b'"):
        flatten({"a": {"b": np.zeros(2)}, "a.b": np.zeros(2)})


def test_two_keras_variables_of_one_path_are_refused():
    class Twice(keras.Model):
        def __init__(self):
            super().__init__()
            self.parts = [keras.layers.Dense(OUT, name="up") for _ in range(2)]

        def call(self, x):
            return sum(part(x) for part in self.parts)

    model = Twice()
    model(np.zeros((1, IN), np.float32))
    with pytest.raises(ValueError, match=r"two variables .*names of their own"):
        flatten(model)


@pytest.mark.parametrize("given", [3, [np.zeros(2)], nn.Dense(3)], ids=["int", "list", "Linen"])
def test_what_is_no_port_and_no_tree_is_refused(given):
    with pytest.raises(TypeError, match=r"module: expected an nnx.Module.* a tree of arrays"):
        load(given, WEIGHT, Layout(row("weight", "up")))


@pytest.mark.slow
def test_no_package_is_imported_to_recognize_its_ports():
    tell = "from jax_attn.transfer.kinds.held import why_no_port; why_no_port(3)"
    loaded = "import sys; print([m for m in ('equinox', 'keras', 'torch') if m in sys.modules])"
    assert fresh_python(f"{tell}\n{loaded}").strip() == "[]"
    assert fresh_python(f"import equinox\n{tell}\n{loaded}").strip() == "['equinox']"
