"""Runs share a float64 copy of the parameters, and nothing that a call changes; one is kept."""

import weakref

import numpy as np
import pytest
import torch
from torch import nn

from jax_attn.parity.run import reference as reference_module
from jax_attn.parity.run.inputs_and_runs import Inputs
from jax_attn.parity.run.module_copies import ModuleCopies
from jax_attn.parity.run.reference import Reference

TOKENS = np.array([[3, 5, 2], [7, 3, 1]])


class Counting(nn.Module):
    """Adds one to a buffer and to an attribute in each call."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(5)
        self.register_buffer("calls", torch.zeros(()))
        self.weight = nn.Parameter(torch.ones(5))
        self.tied = self.weight
        self.count = 0

    def forward(self, x):
        self.calls += 1
        self.count += 1
        return self.norm(x) * (self.calls + self.count) + self.tied


class Written(nn.Module):
    """An embedding that writes to its own rows; `.data` hides it from torch's own count."""

    def __init__(self, hidden: bool):
        super().__init__()
        self.table = nn.Embedding(11, 5, max_norm=None if hidden else 0.5)
        self.hidden = hidden

    def forward(self, tokens):
        if self.hidden:
            self.table.weight.data.mul_(0.5)
        return self.table(tokens)


def test_parameters_are_shared_and_nothing_else():
    given = Counting()
    copies = ModuleCopies(given)
    first, second = copies.wide(), copies.wide()
    assert first is not second
    assert first.weight is second.weight is first.tied
    assert first.weight is not given.weight
    assert first.weight.dtype is torch.float64
    assert first.calls is not second.calls


def test_every_run_starts_from_the_module_as_it_was_given():
    x = np.random.default_rng(0).standard_normal((7, 5)).astype(np.float32)
    reference = Reference(Counting().train(), None, Inputs((x,), {}))
    runs = [reference.exact({}).outputs["output"].copy() for _ in range(3)]
    assert all((run == runs[0]).all() for run in runs)


@pytest.mark.parametrize("hidden", [False, True], ids=["a largest norm", "through .data"])
def test_parameters_that_a_call_writes_to_are_copied_for_each(hidden):
    module = Written(hidden)
    before = module.table.weight.clone()
    reference = Reference(module, None, Inputs((TOKENS,), {}))
    runs = [reference.exact({}).outputs["output"].copy() for _ in range(3)]
    assert all((run == runs[0]).all() for run in runs)
    assert torch.equal(module.table.weight, before)
    assert not np.array_equal(runs[0], before.double().detach().numpy()[TOKENS])


def test_the_same_module_on_other_inputs_has_the_same_copies():
    reference = Reference(Written(False), None, Inputs((TOKENS,), {}))
    other = reference.given(Inputs((TOKENS + 1,), {}))
    assert other._copies is reference._copies
    assert not np.array_equal(*(r.exact({}).outputs["output"] for r in (reference, other)))


def test_of_the_perturbed_runs_one_is_alive_at_a_time(monkeypatch):
    """Its arrays are dropped once they are added up: a large model's would fill the memory."""
    monkeypatch.setattr(reference_module, "_SMALL", -1)  # of a small one all are made in one pass
    under, arrays, alive = Reference.under, [], []

    def watched(*args, **options):
        alive.append(sum(array() is not None for array in arrays))
        run = under(*args, **options)
        arrays.extend(weakref.ref(a) for a in run.parameter_grads.values())
        return run

    x = np.random.default_rng(0).standard_normal((7, 5)).astype(np.float32)
    reference = Reference(nn.Linear(5, 3), None, Inputs((x,), {}))
    cotangents = {"output": np.ones((7, 3), np.float32)}
    center, _ = reference.center(cotangents)
    monkeypatch.setattr(Reference, "under", watched)
    reference.spread("float32", cotangents, 5, center)
    assert len(arrays) == 2 * 5
    assert alive == [0] * 5
