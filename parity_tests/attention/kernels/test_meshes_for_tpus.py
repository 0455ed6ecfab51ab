"""Attention in meshes of Auto axes as a TPU gets it: XLA cuts the program by itself."""

from functools import partial

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from helpers.attention.mesh_calls import (
    KERNELS,
    ROWS,
    ROWS_AND_HEADS,
    Row,
    assert_equal,
    assert_equal_under,
    both_passes,
    by_blocked,
    in_a_scan,
    in_a_vmap_of_a_vmap,
    operands,
    rematerialized,
)
from helpers.attention.meshes import collectives, mesh, placed

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture
def for_tpus(monkeypatch):
    """In meshes of Auto axes the program that a TPU gets, on CPU devices."""
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *x, tpu, default: tpu(*x))
    jax.clear_caches()  # of what was traced for CPUs
    yield
    jax.clear_caches()


# Row → whether its loops differ from row to row, so that devices ask if any has a turn left.
FOR_TPUS = {
    "both": False,
    "one key/value head": False,
    "fewer key/value heads than devices": False,
    "a bias of all": False,
    "lengths": True,
    "dropout": False,
    "a learned key, a zero and sinks": False,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FOR_TPUS)
def test_on_tpus_equal_and_cut_without_custom_partitioning(for_tpus, name):
    row = ROWS[name]
    run = jax.jit(partial(both_passes, KERNELS["blocked"], row.options))
    with jax.enable_x64(True):
        arrays, specs = operands(row)
        there = placed(mesh("auto", rows=2, heads=4), arrays, specs)
        lowered = run.lower(*there)
        assert "CustomSPMDPartitioning" not in lowered.as_text()
        program = lowered.compile()
        found = program(*there)
        assert_equal(arrays, found, both_passes("dense", row.options, *arrays))
        assert found[0].sharding.is_equivalent_to(there[1].sharding, 4)
        wanted = {"all-reduce"} if row.sums or FOR_TPUS[name] else set()
        wanted |= {"all-gather"} if "auto" in row.whole else set()
        assert collectives(program).keys() == wanted


@pytest.mark.slow
@pytest.mark.parametrize("transform", [in_a_vmap_of_a_vmap, rematerialized, in_a_scan])
def test_transforms_on_tpus(for_tpus, transform):
    assert_equal_under(transform, "auto")


def with_the_mesh_set(at, *qkv):
    with jax.set_mesh(at.mesh):
        return jax.jit(by_blocked, in_shardings=at).lower(*qkv)


def with_placed_keys(at, q, *kv):
    return jax.jit(by_blocked).lower(q, *placed(at.mesh, kv, [at.spec] * 2))


def with_in_shardings_alone(at, *qkv):
    return jax.jit(by_blocked, in_shardings=at).lower(*qkv)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lower", "is_known"),
    [(with_the_mesh_set, True), (with_placed_keys, True), (with_in_shardings_alone, False)],
)
def test_what_says_that_a_program_is_for_a_mesh(for_tpus, lower, is_known):
    at = NamedSharding(mesh("auto", rows=2, heads=4), ROWS_AND_HEADS)
    qkv = (x.astype(np.float32) for x in operands(Row())[0][1:])
    text = lower(at, *qkv).as_text()
    assert ("CustomSPMDPartitioning" not in text) is is_known
