"""Without gradients, what is added and too small to be missed is noted, with the remedy."""

import numpy as np
import pytest
import torch

from helpers.parity.canary_trials import try_on
from jax_attn.parity.checking.canaries import small_branches

X = np.random.default_rng(0).standard_normal((2, 7, 5))


class Layers(torch.nn.Module):
    """Two layers, of which one adds a branch with a factor. add: how it does."""

    def __init__(self, add, factor):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = torch.nn.Linear(5, 5), torch.nn.Linear(5, 5)
        self.factor = torch.nn.Parameter(torch.full((5,), factor))
        torch.nn.init.constant_(self.last.bias, 1e-9 if add == "a bias" else 0.5)
        self.add = add

    def forward(self, x):
        branch = torch.tanh(self.first(x))
        if self.add == "a sum":
            x = x + self.factor * branch
        elif self.add == "the first term":
            x = self.factor * branch + x
        elif self.add == "in place":
            x = x.clone()
            x += self.factor * branch
        elif self.add == "scores":
            x = (x + (-1e9 * (torch.arange(5) > 2)).to(x)).softmax(-1)
        elif self.add == "a product and a sum":
            x = torch.addcmul(x, self.factor, branch)
        return self.last(x)


# add, factor, gradients -> whether it is noted
ROWS = {
    "LayerScale's": ("a sum", 1e-9, False, True),
    "as the first term": ("the first term", 1e-9, False, True),
    "in place": ("in place", 1e-9, False, True),
    "with its product": ("a product and a sum", 1e-9, False, True),
    "a bias": ("a bias", 1.0, False, True),
    "with gradients": ("a sum", 1e-9, True, False),
    "small, above rounding": ("a sum", 1e-3, False, False),
    "scores beside a mask's fill": ("scores", 1.0, False, False),
    "large": ("a sum", 0.5, False, False),
    "zero, which other canaries try": ("a sum", 0.0, False, False),
}


@pytest.mark.parametrize("row", ROWS)
def test_a_branch_too_small_to_show_is_noted(row):
    add, factor, gradients, noted = ROWS[row]
    tried = try_on(Layers(add, factor), (X,), gradients=gradients)
    assert ("small-branch" in tried.notes) == noted, tried.said
    assert not noted or "gradients=True" in tried.said


def test_only_the_branch_that_is_too_small_is_named():
    class Both(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.shown, self.hidden = Layers("a sum", 1e-3), Layers("a sum", 1e-9)

        def forward(self, x):
            return self.hidden(self.shown(x))

    said = try_on(Both(), (X,), gradients=False).said
    assert "what is added in `hidden` is so small" in said


def test_branches_that_were_not_tried_have_a_remedy(monkeypatch):
    monkeypatch.setattr(small_branches, "ALONE", 0)
    tried = try_on(Layers("a sum", 1e-9), (X,), gradients=False)
    assert "few-tried" in tried.standing
    assert "tried in 0 of 1" in tried.said
    assert "use gradients=True" in tried.said
