"""Where a call's time goes: every operation is found, and is of the module that it belongs to."""

import jax
import pytest
import torch
from flax import nnx

from helpers.families.whole_models import LAYERS
from jax_attn.bench.pair.checkpoint import pair_of_checkpoint
from jax_attn.bench.programs import operations
from jax_attn.bench.programs.jax_pair import JaxPair
from jax_attn.bench.programs.operations import REST, jax_operations, scoped, torch_operations
from jax_attn.bench.workload import DECODE, PREFILL


@pytest.fixture(autouse=True)
def all_of_them(monkeypatch):
    monkeypatch.setattr(operations, "MOST", 1000)


def test_of_torch_each_product_and_what_differentiates_it_are_of_their_module():
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.ReLU(), torch.nn.Linear(7, 3))
    x = torch.ones(2, 5)
    found = torch_operations(model, lambda: model(x).square().sum().backward())
    kinds = {path: {kind for at, kind, _ in found if at == path} for path, *_ in found}
    for path in ("0", "2"):
        assert "aten::addmm" in kinds[path]
        assert "aten::mm" in kinds[path]  # of its gradients
    assert "aten::relu" in kinds["1"]
    assert found[-1][:2] == ("", REST)


@pytest.mark.slow
def test_of_jax_each_operation_is_of_the_module_that_it_is_traced_in():
    model = nnx.Sequential(nnx.Linear(5, 7, rngs=nnx.Rngs(0)), nnx.Linear(7, 3, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(model)

    @jax.jit
    def call(state, x):
        port = nnx.merge(graph, state)
        with scoped(port):
            return port(x)

    x = jax.numpy.ones((64, 5))
    program = call.lower(state, x).compile().as_text()
    found = jax_operations(program, lambda: jax.block_until_ready(call(state, x)))
    assert {"layers.{layer}"} <= {path for path, *_ in found}
    assert found[-1][:2] == ("", REST)


def test_a_module_that_inherits_its_call_is_named_too():
    class Inherits(nnx.Linear):
        pass

    model = nnx.Sequential(Inherits(5, 7, rngs=nnx.Rngs(0)), nnx.relu)

    def call(x):
        with scoped(model):
            return model(x)

    text = jax.jit(call).lower(jax.numpy.ones((3, 5))).compile().as_text()
    assert "module:layers.0/" in text


def test_nothing_was_spent_where_a_profile_has_no_operations():
    assert jax_operations("", lambda: None) == ()


@pytest.mark.slow
def test_a_steps_products_are_of_the_modules_whose_parameters_they_read(small):
    """XLA makes them itself, of a row alone, and says nothing of where they come from."""
    side = JaxPair(pair_of_checkpoint(small("gpt2").folder, (5,)))
    side.names_modules = True
    calls, state = side.at(5)
    _, state["cache"] = calls[PREFILL](state)
    program = calls[DECODE].lowered(state).compile().as_text()
    places = operations._places(program)
    products = {path for operation, (path, _) in places.values() if operation == "dot"}
    parts = ("attention.q_proj", "attention.k_proj", "attention.v_proj", "attention.out_proj")
    parts += ("mlp.up", "mlp.down")
    wanted = {f"layers.{layer}.{part}" for layer in range(LAYERS) for part in parts}
    assert wanted <= products


def test_what_runs_others_is_not_counted():
    """A conditional is named after what it was traced from."""
    text = (
        "  %cond.12 = (f32[2]{0}, s32[]) conditional(%a.1, %b.2), branch_computations={%c, %d}, "
        'metadata={op_name="jit(f)/module:layers.0/cond"}\n'
        '  ROOT %dot.3 = f32[2,3]{1,0} dot(%a.1, %b.2), metadata={op_name="jit(f)/module:q/dot"}\n'
    )
    places = operations._places(text)
    assert places["cond.12"][0] in operations._AROUND
    assert places["dot.3"] == ("dot", ("q", "dot"))
