"""Buffers and parameters at values that do nothing are noted, and others are not."""

import numpy as np
import pytest
import torch

from helpers.parity.canary_trials import try_on

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
    "zero points": (torch.zeros(D, dtype=torch.int8), lambda x, b: x - b, "0"),
    "a count that nothing reads": (torch.tensor(0), lambda x, b: 2 * x, ""),
    "rows of a table of one": (
        torch.zeros(D, dtype=torch.int64),
        lambda x, rows: x + torch.ones(1, 1)[rows, 0],
        "",
    ),
}


@pytest.mark.parametrize("row", BUFFERS)
def test_a_buffer_that_does_nothing_is_noted(row):
    value, compute, number = BUFFERS[row]
    module = Uses(value.clone(), compute)
    tried = try_on(module, (X,), gradients=True)
    assert ("neutral-weights" in tried.notes) == bool(number), tried.said
    note = f"buffer `part.shift` of the reference is {number} throughout, so a port that leaves it"
    assert (note in tried.said) == bool(number)
    assert torch.equal(module.part.shift, value)


def test_running_statistics_are_noted_together_where_they_are_read():
    norms = torch.nn.Sequential(torch.nn.BatchNorm1d(D), torch.nn.BatchNorm1d(D))
    said = try_on(norms.eval(), (X[:, 0],)).said
    assert "buffers `0.running_mean` and `1.running_mean` of the reference are 0" in said
    assert "buffers `0.running_var` and `1.running_var` of the reference are 1" in said
    assert "running" not in try_on(norms.train(), (X[:, 0],)).said


class Scales(torch.nn.Module):
    """A weight that multiplies, as 1 + w, and a bias, both as they are initialised."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(D))
        self.in_bias = torch.nn.Parameter(torch.zeros(D))

    def forward(self, x):
        return x * (1 + self.weight) + self.in_bias


def test_a_parameter_that_does_nothing_is_noted():
    """With gradients, its formula alone stays open, and a sum has one formula."""
    tried = try_on(Scales(), (X,), gradients=True)
    assert ("neutral-formula" in tried.standing, "neutral-weights" in tried.notes) == (True, False)
    assert "parameter `weight` of the reference is 0 throughout, so a port that uses" in tried.said
    assert "in_bias" not in tried.said
    assert try_on(Scales(), (X,)).notes.count("neutral-weights") == 2


def test_parameters_that_were_drawn_are_not_noted():
    module = Scales()
    for x in module.parameters():
        torch.nn.init.normal_(x, generator=torch.Generator().manual_seed(0))
    for gradients in (True, False):
        notes = try_on(module, (X,), gradients=gradients).notes
        assert {*notes}.isdisjoint({"neutral-weights", "neutral-formula"})


INPUTS = {
    "zeros that are added": (added, np.zeros(D), False, True),
    "ones that divide": (divided, np.ones(D), False, True),
    "zeros that are added, with gradients": (added, np.zeros(D), True, False),
    "twos": (divided, 2 * np.ones(D), False, False),
    "zeros that nothing reads": (lambda x, b: 2 * x, np.zeros(D), False, False),
}


@pytest.mark.parametrize("row", INPUTS)
def test_an_input_that_does_nothing_is_noted(row):
    call, given, gradients, noted = INPUTS[row]
    tried = try_on(call, (X, given), gradients=gradients)
    assert ("neutral-input" in tried.notes) == noted, tried.said
