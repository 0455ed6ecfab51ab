"""Maps show where the error sits, however large the tensor is, and are of failed tensors alone."""

import numpy as np
import pytest

from jax_attn.parity.judge import figures
from jax_attn.parity.judge.budget import Budget
from jax_attn.parity.judge.compare import judge

SHAPES = {
    "number": ((), (1, 1, 1)),
    "vector": ((70,), (1, 1, 32)),
    "matrix": ((5, 3), (1, 5, 3)),
    "heads": ((2, 7, 37, 41), (6, 16, 32)),
    "nothing": ((0, 3), (0, 0)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_map_is_no_larger_than_can_be_seen(name):
    shape, expected = SHAPES[name]
    zeros = np.zeros(shape)
    drawn = figures.maps(zeros, zeros, zeros + 1)
    assert (len(drawn), *np.shape(drawn[0].cells if drawn else ())) == expected


def test_each_cell_is_the_largest_error_over_its_budget_there():
    want = np.zeros((2, 3, 32, 64))
    got = want.copy()
    got[1, 2, 5, 7] = 3e-3  # of two rows and two columns a cell
    got[0, 2, 4, 6] = -2e-3
    got[0, 0, 31, 63] = np.nan
    places, drawn = zip(*figures.maps(want, got, np.full(want.shape, 1e-3)), strict=True)
    assert places == (0, 2, 1)  # the worst first
    first, third, second = drawn
    assert first[15][31] == np.inf
    assert sum(map(sum, second)) == 0
    assert third[2][3] == 3
    assert sum(map(sum, third)) == 3


def test_the_worst_places_are_drawn_wherever_they_lie():
    want = np.zeros((1, 11, 4, 4))
    got = want.copy()
    got[0, 10, 2, 3] = 5e-3
    (worst, *others) = figures.maps(want, got, np.full(want.shape, 1e-3))
    assert (worst.place, worst.cells[2][3], len(others)) == (10, 5, figures.MAPS - 1)


def test_what_is_undefined_on_both_sides_is_no_error():
    want = np.array([[np.nan, np.inf, 1.0]])
    assert figures.maps(want, want.copy(), np.full(want.shape, np.nan)) == (
        (0, ((0.0, 0.0, 0.0),)),
    )


def test_only_a_tensor_that_fails_has_maps():
    want = np.arange(1.0, 7).reshape(2, 3)
    budget = Budget(np.full((2, 3), 1e-6, np.float32), 1e-6, 1e-8, 1e-6, 1e-12)
    named = {"kind": "output", "name": "y", "transform": "jit"}
    right, wrong = (judge(want, want + by, None, budget, **named) for by in (0, 1e-3))
    assert (right.heat, len(wrong.heat)) == ((), 1)
    assert "heat" not in wrong.as_dict()
