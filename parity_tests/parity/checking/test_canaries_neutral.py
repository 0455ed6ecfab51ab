"""Buffers at values that do nothing are noted, and others are not."""

import numpy as np
import pytest
import torch

from helpers.canary_trials import try_on

D = 5
X = np.random.default_rng(0).standard_normal((3, 2, D))


class Uses(torch.nn.Module):
    """A buffer, in a part of the module, and what is computed with it."""

    def __init__(self, value, compute):
        super().__init__()
        self.part = torch.nn.Module()
        self.part.register_buffer("shift", value)
        self.compute = compute

    def forward(self, x):
        return self.compute(x, self.part.shift)


def added(x, b):
    return x + b


def divided(x, b):
    return x / b


ZEROS, ONES = torch.zeros(D), torch.ones(D)
BUFFERS = {
    "zeros that are added": (ZEROS, added, "0"),
    "ones that divide": (ONES, divided, "1"),
    "a number": (torch.tensor(0.0), added, "0"),
    "zeros, but for one": (torch.eye(D)[0], added, ""),
    "other numbers throughout": (2 * ONES, divided, ""),
    "zeros that nothing reads": (ZEROS, lambda x, b: 2 * x, ""),
    "integers": (torch.zeros(D, dtype=torch.int64), added, ""),
}


@pytest.mark.parametrize("row", BUFFERS)
def test_a_buffer_that_does_nothing_is_noted(row):
    value, compute, number = BUFFERS[row]
    module = Uses(value.clone(), compute)
    note = f"buffer `part.shift` of the reference is {number} throughout, so a port that leaves it"
    _, notes = try_on(module, (X,), gradients=True)
    assert (note in notes) == ("buffer" in notes) == bool(number), notes
    assert torch.equal(module.part.shift, value)


def test_running_statistics_are_noted_together_where_they_are_read():
    norms = torch.nn.Sequential(torch.nn.BatchNorm1d(D), torch.nn.BatchNorm1d(D))
    _, notes = try_on(norms.eval(), (X[:, 0],))
    assert "buffers `0.running_mean` and `1.running_mean` of the reference are 0" in notes
    assert "buffers `0.running_var` and `1.running_var` of the reference are 1" in notes
    _, notes = try_on(norms.train(), (X[:, 0],))
    assert "running" not in notes
