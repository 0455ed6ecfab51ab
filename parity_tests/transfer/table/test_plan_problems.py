"""A plan shows every problem that a load raises: each kind alone, and several at once."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from helpers.transfer.small_model import problems_of
from jax_attn import transfer
from jax_attn.transfer import Layout, either, linear, refused, row, tied

D, W = 5, 7
LAYOUT = Layout(
    row("norm.weight", "norm"),
    row("up.weight", "up", linear),
    either(row("down.weight", "down", linear), row("down_t.weight", "down")),
    tied("lm_head.weight", "up.weight"),
    refused("bias_k", "a learned key has no place"),
)
ODD_MESH = AbstractMesh((2,), ("a",))


class Model(nnx.Module):
    """Three parameters without values; `more` replaces or adds some."""

    def __init__(self, **more):
        shapes = {"norm": (D,), "up": (D, W), "down": (W, D)}
        arrays = {name: jax.ShapeDtypeStruct(s, jnp.float32) for name, s in shapes.items()}
        for name, array in (arrays | more).items():
            setattr(self, name, nnx.Param(array))


def abstract(*shape, dtype=jnp.float32, axes=None):
    sharding = None if axes is None else NamedSharding(ODD_MESH, PartitionSpec(*axes))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def numbers(*shape, dtype=np.float32):
    return np.arange(1, 1 + np.prod(shape), dtype=dtype).reshape(shape)


UP, DOWN, NORM, HEAD = "up.weight", "down.weight", "norm.weight", "lm_head.weight"
WIDE = jax.ShapeDtypeStruct((D,), np.dtype("float64"))
# Other tensors, kind by kind, are in test_transfer_refusals.py.
# name -> parameters of the module, tensors (None: left out), kind and name of each problem
PROBLEMS = {
    "ambiguous": ({}, {"down_t.weight": numbers(W, D)}, [("ambiguous", DOWN)]),
    "refused": ({}, {"bias_k": numbers(2)}, [("refused", "bias_k")]),
    "unwritten": ({"extra": abstract(2)}, {}, [("unwritten", "extra")]),
    "no array": ({"norm": "text"}, {NORM: None}, [("unreadable", "norm")]),
    "tied, another tensor": ({}, {HEAD: numbers(W, D) + 1}, [("ambiguous", HEAD)]),
    "tied, another shape": ({}, {HEAD: numbers(D, W)}, [("ambiguous", HEAD)]),
    "tied, another dtype": ({}, {HEAD: numbers(W, D, dtype=np.int32)}, [("ambiguous", HEAD)]),
    "tied, unreadable": ({}, {HEAD: "text"}, [("unreadable", HEAD)]),
    "an abstract mesh": ({"norm": abstract(D, axes=(None,))}, {}, [("unwritten", "norm")]),
    "a dtype too wide": (
        {"norm": WIDE},
        {NORM: numbers(D, dtype=np.float64)},
        [("wrong dtype", "norm")],
    ),
    "several at once": (
        {"norm": WIDE, "up": abstract(D, W, axes=("a",)), "extra": abstract(2)},
        {
            HEAD: numbers(W, D) + 1,
            NORM: numbers(D, dtype=np.float64),
            DOWN: None,
            "stray": numbers(2),
        },
        [
            ("missing", DOWN),
            ("unexpected", "stray"),
            ("unwritten", "extra"),
            ("ambiguous", HEAD),
            ("wrong dtype", "norm"),
            ("unwritten", "up"),
        ],
    ),
    "a tie beside a missing tensor": (
        {},
        {HEAD: numbers(W, D) + 1, NORM: None},
        [("missing", NORM), ("ambiguous", HEAD)],
    ),
    "a mesh beside a wrong shape": (
        {"norm": abstract(D, axes=(None,))},
        {NORM: numbers(W)},
        [("wrong shape", NORM), ("unwritten", "norm")],
    ),
}


def tensors(**changes):
    held = {NORM: numbers(D), UP: numbers(W, D), DOWN: numbers(D, W), HEAD: numbers(W, D)}
    return {key: tensor for key, tensor in (held | changes).items() if tensor is not None}


@pytest.fixture(autouse=True)
def no_x64():
    with jax.enable_x64(False):
        yield


def test_without_a_change_there_is_no_problem():
    plan = transfer.load(module := Model(), tensors(), LAYOUT)
    assert plan.problems == []
    assert "problem" not in str(plan)
    np.testing.assert_array_equal(module.up.get_value(), numbers(W, D).T)


@pytest.mark.parametrize(("more", "changes", "expected"), PROBLEMS.values(), ids=PROBLEMS)
def test_a_plan_shows_what_a_load_raises(more, changes, expected):
    module, held = Model(**more), tensors(**changes)
    plan = transfer.plan(module, held, LAYOUT)
    assert [(problem.kind, problem.name) for problem in plan.problems] == expected
    raised, message = problems_of(lambda: transfer.load(module, held, LAYOUT))
    assert raised == expected
    for problem in plan.problems:
        assert str(problem) in str(plan)
        assert str(problem) in message


def test_a_step_that_fails_on_the_values_is_an_error_of_the_transfer():
    def broken(arrays, shapes):
        raise RuntimeError("no such number")

    step = dataclasses.replace(linear, name="mine", forward=broken)
    layout = Layout(row(NORM, "norm"), row(UP, "up", step), row(DOWN, "down", linear))
    module, held = Model(), tensors(**{HEAD: None})
    raised, message = problems_of(lambda: transfer.load(module, held, layout))
    assert raised == [("refused", UP)]
    assert "step mine raised RuntimeError: no such number" in message
    assert isinstance(module.norm.get_value(), jax.ShapeDtypeStruct)
