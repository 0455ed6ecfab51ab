"""Perturbed runs in two threads: the bits of runs one by one, and the process as it was."""

import threading

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from jax_attn.parity.run import reference as reference_module
from jax_attn.parity.run.at_once import in_order
from jax_attn.parity.run.inputs_and_runs import Inputs
from jax_attn.parity.run.reference import Reference

RUNS = 5


class Block(torch.nn.Module):
    """Attention, statistics that a call changes, experts that are chosen by rank."""

    def __init__(self):
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(6, 2, batch_first=True)
        self.norm = torch.nn.BatchNorm1d(6)
        self.router = torch.nn.Linear(6, 3)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(3))

    def forward(self, x):
        y = self.norm((x + self.attention(x, x, x)[0]).flatten(0, 1))
        each = torch.stack([expert(y) for expert in self.experts], dim=1)
        _, expert = self.router(y).topk(1)
        return each.gather(1, expert[..., None].expand(-1, 1, 6)).squeeze(1)


@pytest.fixture
def two_threads(monkeypatch):
    monkeypatch.setattr(reference_module, "_SMALL", -1)  # else all runs are made in one pass
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def reference():
    torch.manual_seed(0)
    x = np.random.default_rng(0).standard_normal((2, 7, 6)).astype(np.float32)
    return Reference(Block().train(), None, Inputs((x,), {}))


def process_wide():
    backends = torch.backends
    return (
        torch.get_num_threads(),
        backends.mha.get_fastpath_enabled(),
        backends.cuda.flash_sdp_enabled(),
        is_in_torch_dispatch_mode(),
    )


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_two_at_once_give_the_budgets_of_one_by_one(precision, reference, two_threads, monkeypatch):
    under, names, before = Reference.under, [], process_wide()
    both_begun = threading.Barrier(2)

    def watched(*args, **options):
        names.append(name := threading.current_thread().name)
        if name != threading.main_thread().name and names.count(name) == 1:
            both_begun.wait(60)
        return under(*args, **options)

    monkeypatch.setattr(Reference, "under", watched)
    cotangents = {"output": np.ones((14, 6), np.float32)}
    center, _ = reference.center(cotangents)
    budgets = []
    for long, threads in ((float("inf"), 1), (0.0, 3)):
        names.clear()
        monkeypatch.setattr(reference_module, "LONG", long)
        budgets.append(reference.spread(precision, cotangents, RUNS, center))
        assert len({*names}) == threads
        assert process_wide() == before
    one_by_one, at_once = budgets
    for kind, named in one_by_one.items():
        for name, want in named.items():
            got = at_once[kind][name]
            assert np.array_equal(got.element, want.element, equal_nan=True)
            for figure in ("rms", "floor", "projection", "zero"):
                assert repr(getattr(got, figure)) == repr(getattr(want, figure))


def test_each_thread_differentiates_where_the_caller_does(reference, two_threads, monkeypatch):
    monkeypatch.setattr(reference_module, "LONG", 0.0)
    with torch.no_grad():
        budgets = reference.spread("float32", {"output": np.ones((14, 6), np.float32)}, RUNS)
    assert budgets["gradient of input"]["0"].floor == 0


def test_what_a_perturbed_run_raises_is_raised_and_no_mode_is_left_on(
    reference, two_threads, monkeypatch
):
    monkeypatch.setattr(reference_module, "LONG", 0.0)
    before, under, calls = process_wide(), Reference.under, []

    def failing(*args, **options):
        calls.append(1)
        if len(calls) == 4:
            raise MemoryError
        return under(*args, **options)

    monkeypatch.setattr(Reference, "under", failing)
    with pytest.raises(MemoryError):
        reference.spread("float32", {}, RUNS)
    assert process_wide() == before
    assert torch.ones(()).dtype is torch.float32


def test_results_are_in_order_and_few_wait():
    second, started, most = threading.Event(), [], []

    def call(item):
        started.append(item)
        if item == 0:
            assert second.wait(60)
        if item == 1:
            second.set()
        return item

    for taken, item in enumerate(in_order(call, iter(range(7)), 2)):
        assert item == taken
        most.append(len(started) - taken)
    assert sorted(started) == list(range(7))
    assert max(most) <= 2
