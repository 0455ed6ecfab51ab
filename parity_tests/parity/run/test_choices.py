"""Operators that choose one of their numbers, and distances of 0: perturbed runs stay finite.

torch's derivative compares the result with each number, or divides by the distance.
"""

import math

import numpy as np
import pytest
import torch
from torch.nn import functional

from jax_attn.parity.run.inputs_and_runs import Inputs
from jax_attn.parity.run.reference import Reference

B, S, D = 3, 7, 11
rng = np.random.default_rng(0)
X = rng.standard_normal((B, S))
TO = torch.from_numpy(rng.integers(0, S, (B, S)))


def scattered(x, reduce, include_self=True):
    return torch.ones(B, D).to(x).scatter_reduce(1, TO, x, reduce, include_self=include_self)


CALLS = {
    "scatter_reduce amax": lambda x: scattered(x, "amax"),
    "scatter_reduce amin": lambda x: scattered(x, "amin"),
    "scatter_reduce amax, without itself": lambda x: scattered(x, "amax", include_self=False)[
        :, :1
    ],
    "scatter_reduce mean": lambda x: scattered(x, "mean"),
    "scatter_reduce prod": lambda x: scattered(x, "prod"),
    "index_reduce amax": lambda x: torch.zeros(B, D).to(x).index_reduce(1, TO[0], x, "amax"),
    "norm inf": lambda x: torch.linalg.vector_norm(2 * x, math.inf, dim=1),
    "norm -inf": lambda x: torch.linalg.vector_norm(2 * x, -math.inf, dim=1),
    "norm 3": lambda x: torch.linalg.vector_norm(x, 3, dim=1),
    "median": lambda x: (2 * x).median(),
    "nanmedian": lambda x: (2 * x).nanmedian(),
    "aminmax": lambda x: torch.aminmax(2 * x).max,
    "kthvalue": lambda x: (2 * x).kthvalue(2, 1)[0],
    "mode": lambda x: (2 * x).mode(1)[0],
    "cummax": lambda x: (2 * x).cummax(1)[0],
    "fmax": lambda x: torch.fmax(2 * x, x.flip(0)),
    "distances": lambda x: torch.cdist(x, 1.5 * x.flip(0)),
    "distances of 0": lambda x: torch.cdist(x, x),
    "distances along axes": lambda x: torch.cdist(x, 1.5 * x.flip(0), 1.0),
    "largest distances along an axis": lambda x: torch.cdist(x, 1.5 * x.flip(0), math.inf),
    "distances of order 3": lambda x: torch.cdist(x, 1.5 * x.flip(0), 3.0),
    "distances of order 0.5": lambda x: torch.cdist(x, 1.5 * x.flip(0), 0.5),
    "a norm at 0": lambda x: (x * torch.tensor([[1.0], [0], [1]])).norm(dim=1),
    "max_pool1d": lambda x: functional.max_pool1d((2 * x)[None], 2)[0],
}


@pytest.mark.parametrize("name", CALLS)
def test_perturbed_runs_differ_by_roundoffs(name):
    call = CALLS[name]
    inputs = Inputs.of((X,), np.dtype("float32"))
    reference = Reference(torch.nn.Module(), lambda module, x: call(x), inputs)
    cotangents = {k: np.ones(a.shape) for k, a in reference.outputs("float32").items()}
    exact = reference.exact(cotangents)
    budgets = reference.spread("float32", cotangents, runs=4)
    for kind in ("output", "gradient of input"):
        for key, budget in budgets[kind].items():
            want = exact.kinds[kind][key]
            assert np.isfinite(want).all()
            assert budget.rms <= 1e-4 * np.sqrt(np.square(want).mean())


def test_the_order_of_a_distance_is_told_from_the_next_whole_one():
    inputs = Inputs.of((X,), np.dtype("float32"))
    reference = Reference(torch.nn.Module(), lambda _, x: torch.cdist(x, 2 * x, 1.98), inputs)
    exact, budgets = reference.exact({}), reference.spread("float32", {}, runs=4)
    other = reference.called(lambda _, x: torch.cdist(x, 2 * x, 2.0)).exact({})
    off = np.abs(other.outputs["output"] - exact.outputs["output"]).max()
    assert off > 100 * budgets["output"]["output"].element.max()
