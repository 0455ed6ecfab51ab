"""An epsilon that large activations hide is a note, and activations as small as it says show it."""

import re

import numpy as np
import pytest
import torch

from helpers.parity.canary_trials import try_on

B, T, D = 3, 7, 6
X = np.random.default_rng(0).standard_normal((B, T, D))


def noted(norm: torch.nn.Module, x: np.ndarray, dtype: str = "float32"):
    """The kinds of notes on epsilons, those of them that stand, and all that is said."""
    module = torch.nn.Sequential(norm, torch.nn.Identity()).eval().to(getattr(torch, dtype))
    tried = try_on(module, (x,), dtype)
    of_epsilons = ("epsilon", "epsilon-alone", "epsilon-of-denominator", "few-tried")
    notes, standing = ([k for k in ks if k in of_epsilons] for ks in (tried.notes, tried.standing))
    return notes, standing, tried.said


class RMSNorm(torch.nn.Module):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class BySqrt(torch.nn.Module):
    def forward(self, x):
        x = x - x.mean(-1, keepdim=True)
        return x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-5)


class ByPow(torch.nn.Module):
    def forward(self, x):
        return x * torch.pow(x.square().mean(-1, keepdim=True) + 1e-5, -0.5)


NORMS = {
    "LayerNorm": lambda: torch.nn.LayerNorm(D),
    "LayerNorm of BERT": lambda: torch.nn.LayerNorm(D, eps=1e-12),
    "GroupNorm": lambda: torch.nn.GroupNorm(1, T),
    "torch's RMSNorm": lambda: torch.nn.RMSNorm(D, eps=1e-6),
    "RMSNorm": RMSNorm,
    "by a square root": BySqrt,
    "by a power": ByPow,
}


@pytest.mark.parametrize("row", NORMS)
def test_an_epsilon_is_noted_beside_large_activations_alone(row):
    notes, standing, said = noted(NORMS[row](), 1000 * X)
    assert (notes, standing) == (["epsilon"], [])
    assert "in `0` would pass: with activations of an RMS of at least" in said
    need = float(re.search(r"an RMS of (\S+) or less", said)[1])
    assert 0.5 < need < 5
    rms = np.sqrt(np.mean(X**2))
    assert noted(NORMS[row](), need / rms * X)[0] == []


def test_the_running_variance_of_a_batch_norm_counts():
    norm = torch.nn.BatchNorm1d(T)
    assert noted(norm, 1000 * X)[0] == []
    norm.running_var.fill_(1e6)
    assert noted(norm, X)[0] == ["epsilon"]


def test_low_precision_hides_every_epsilon_and_says_nothing():
    assert noted(torch.nn.LayerNorm(D), 1000 * X, "bfloat16")[0] == []


def test_one_norm_of_several_is_named():
    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = torch.nn.LayerNorm(D), torch.nn.LayerNorm(D)

        def forward(self, x):
            return self.second(0.1 * self.first(x) * torch.arange(D))

    notes, _, said = noted(Two(), 1000 * X)
    assert (notes, "in `0.first` would pass: with activations" in said) == (["epsilon"], True)
    # The second norm takes back most of what the first changes.
    assert noted(Two(), X)[1] == ["epsilon-alone"]
    assert noted(Two(), 0.01 * X)[0] == []


def test_an_epsilon_that_is_wrong_in_one_norm_alone_is_tried():
    class Faint(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = torch.nn.LayerNorm(D), torch.nn.LayerNorm(D)

        def forward(self, x):
            return self.second(x) + 1e-3 * self.first(x)

    notes, standing, said = noted(Faint(), X)
    assert notes == standing == ["epsilon-alone"]
    assert "a port with a wrong epsilon in one norm alone in `0.first` would pass" in said
    assert noted(Faint(), 0.01 * X)[0] == []


def test_of_many_norms_three_are_tried_alone():
    class Many(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(D) for _ in range(4))

        def forward(self, x):
            return torch.stack([norm(x) for norm in self.norms])

    notes, _, said = noted(Many(), 0.01 * X)
    assert (notes, "one norm alone was tried in 3 of 4" in said) == (["few-tried"], True)
    assert "and in each of them it shows; to try the others" in said


class Divided(torch.nn.Module):
    def forward(self, x):
        return x / (x.abs().sum(-1, keepdim=True) + 1e-6)


class ByReciprocal(torch.nn.Module):
    def forward(self, x):
        return x * (1 / (x.abs().sum(-1, keepdim=True) + 1e-6))


@pytest.mark.parametrize("module", [Divided, ByReciprocal])
def test_an_epsilon_in_a_denominator_is_noted_where_it_could_be_left_out(module):
    notes, standing, said = noted(module(), 1000 * X)
    assert notes == standing == ["epsilon-of-denominator"]
    assert "a port without the epsilon of 1e-06 in a denominator in `0` would pass" in said
    assert noted(module(), 1e-4 * X)[0] == []


class Decayed(torch.nn.Module):
    """A norm beside a power whose exponent is a tensor."""

    def forward(self, x):
        x = x * 0.7 ** torch.arange(x.shape[-1])
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def test_a_power_of_many_exponents_is_no_norm():
    notes, _, _ = noted(Decayed(), 100 * X)
    assert notes == ["epsilon"]


ROUNDINGS = 16 * torch.finfo(torch.float32).eps
"""More than a root or a tanh errs by in float32, and less than another epsilon changes it."""


class Guarded(torch.nn.Module):
    """Refuses a root mean square, or a tanh, that is not its own."""

    def forward(self, x):
        square = x.square().mean(-1, keepdim=True)
        root, bent = torch.sqrt(square + 1e-5), torch.tanh(x)
        if not torch.allclose(root.square(), square + 1e-5, rtol=ROUNDINGS):
            raise ValueError("another root")
        if not torch.allclose(bent, 1 - 2 / (1 + torch.exp(2 * x)), rtol=ROUNDINGS):
            raise ValueError("another tanh")
        return bent / root


def test_bugs_that_the_reference_refuses_are_not_counted_as_seen():
    tried = try_on(Guarded(), (X,))
    assert tried.standing.count("bug-not-tried") == 2
    assert "whether these inputs would reveal a wrong epsilon of a norm" in tried.said
    assert "whether these inputs would reveal a wrong tanh" in tried.said
