"""Canaries of a long run are tried in two threads, and find what they find one by one."""

import threading

import numpy as np
import pytest
import torch

from helpers.parity.canary_trials import try_on
from jax_attn.parity.bugs.planting import Placed
from jax_attn.parity.checking import canaries
from jax_attn.parity.run.reference import Reference


class Block(torch.nn.Module):
    """Attention under norms, a large one of which hides its epsilon, and an idle clamp."""

    def __init__(self):
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(6, 2, batch_first=True)
        self.before, self.after = torch.nn.LayerNorm(6), torch.nn.LayerNorm(6)

    def forward(self, x):
        x = self.before(100 * x)
        return self.after(x + self.attention(x, x, x)[0]).clamp(max=50.0)


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def tried(monkeypatch, long):
    """What is found, and the names of the threads that runs were made in."""
    names, under = set(), Reference.under

    def watched(*args, **options):
        names.add(threading.current_thread().name)
        return under(*args, **options)

    monkeypatch.setattr(canaries, "LONG", long)
    torch.manual_seed(0)
    module = Block().eval()
    with monkeypatch.context() as context:
        context.setattr(Reference, "under", watched)
        x = np.random.default_rng(0).standard_normal((2, 7, 6))
        return try_on(module, (x,), gradients=True), names - {threading.main_thread().name}


@pytest.mark.slow
def test_two_threads_find_what_one_finds(two_threads, monkeypatch):
    alone, _ = tried(monkeypatch, float("inf"))
    at_once, threads = tried(monkeypatch, 0.0)
    assert at_once == alone
    assert {"epsilon", "idle-branch"} <= {*alone.notes}
    assert len(threads) >= 2
    assert torch.get_num_threads() == 2
    assert torch.ones(()).dtype is torch.float32


def test_what_a_canary_raises_is_raised(two_threads, monkeypatch):
    def fails(_):
        raise MemoryError

    monkeypatch.setattr(canaries, "try_batches", fails)
    with pytest.raises(MemoryError):
        tried(monkeypatch, 0.0)
    assert torch.ones(()).dtype is torch.float32


class Asking(torch.nn.Module):
    """Keeps the site that a mode is told of in its call."""

    def __init__(self, mode):
        super().__init__()
        self.mode, self.site = mode, None

    def forward(self, x):
        self.site, _ = self.mode.met("any")
        return x


def test_a_mode_does_not_see_the_modules_of_other_threads():
    mode = Placed()
    here, there = Asking(mode), Asking(mode)
    with mode:
        here(torch.ones(()))
        other = threading.Thread(target=there, args=(torch.ones(()),))
        other.start()
        other.join()
    assert here.site == ("", 1)
    assert there.site == (None, 1)
