"""Canaries of attention's own settings: windows, edges of masks, soft caps, saturated softmaxes."""

import numpy as np
import pytest
import torch

from helpers.parity.canary_trials import QUIET
from helpers.parity.canary_trials import try_on as trial

B, T, D = 2, 7, 3
rng = np.random.default_rng(0)
X = rng.standard_normal((B, T, D))


def try_on(module, x=X, **options):
    return trial(module, (x,), **options)


class Windowed(torch.nn.Module):
    """Causal attention of `sliding_window` keys, whose scores fall by `slope` a key."""

    def __init__(self, sliding_window, slope=0.0, fill=-torch.inf, **settings):
        super().__init__()
        self.sliding_window, self.slope, self.fill = sliding_window, slope, fill
        vars(self).update(settings)

    def forward(self, x):
        back = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
        hidden = (back < 0) | (back >= self.sliding_window)
        scores = x @ x.mT - self.slope * back
        return torch.softmax(scores.masked_fill(hidden, self.fill), -1) @ x


@pytest.mark.parametrize("fill", [-torch.inf, -1e9, float(np.finfo(np.float32).min)])
def test_a_window_that_acts_is_not_doubted(fill):
    assert try_on(Windowed(3, fill=fill))[:2] == QUIET
    assert try_on(Windowed(T - 1, fill=fill))[:2] == QUIET


@pytest.mark.parametrize("window", [T, 4096])
def test_a_window_that_no_row_reaches_is_doubted_by_its_name(window):
    tried = try_on(Windowed(window))
    assert tried.doubts == ["window"]
    assert f"the window `sliding_window={window}` is ignored or wrong" in tried.said
    assert f"no query has more than {T} keys" in tried.said
    assert f"to reveal it, use sequences of more than {window + 1}" in tried.said


def test_longer_sequences_are_the_remedy():
    longer = rng.standard_normal((B, T + 2, D))
    assert try_on(Windowed(T), longer)[:2] == QUIET


def test_a_window_of_both_sides_needs_one_key_more():
    class Radius(torch.nn.Module):
        window_size = T - 1

        def __init__(self):
            super().__init__()
            self.window_size = T - 1

        def forward(self, x):
            at = torch.arange(x.shape[1])
            far = (at[:, None] - at).abs() > self.window_size
            return torch.softmax((x @ x.mT).masked_fill(far, -torch.inf), -1) @ x

    assert try_on(Radius()).doubts == ["window"]
    assert try_on(Radius(), rng.standard_normal((B, T + 1, D))).doubts == []


UNUSED = {
    "switched off": {"use_sliding_window": False},
    "no layer has it": {"layer_types": ["full_attention"]},
}


@pytest.mark.parametrize("row", UNUSED)
def test_a_window_that_is_not_used_is_not_doubted(row):
    assert try_on(Windowed(4096, **UNUSED[row])).doubts == []


def test_a_window_of_a_config_is_found_and_one_of_no_attention_is_not():
    class Config:
        sliding_window, layer_types = 4096, ["full_attention", "sliding_attention"]

        def __init__(self):
            self.sliding_window = 4096

    module = Windowed(T - 2)
    module.config = Config()
    assert "`sliding_window=4096`" in try_on(module).said
    layer = torch.nn.Identity()
    layer.window = 4096
    assert try_on(layer).doubts == []


def test_an_edge_that_no_weight_reaches_is_doubted():
    """Keys far back score so low that the window's edge does not show."""
    tried = try_on(Windowed(T - 2, slope=40.0))
    assert tried.doubts.count("mask-edge") == 1
    assert "off by one at the first key of each query" in tried.said
    assert try_on(Windowed(T - 2, slope=0.5))[:2] == QUIET


# --- soft caps ------------------------------------------------------------------------------------


class Capped(torch.nn.Module):
    def __init__(self, cap, of_scores=True):
        super().__init__()
        self.cap, self.of_scores = cap, of_scores

    def forward(self, x):
        def capped(a):
            return self.cap * torch.tanh(a / self.cap)

        scores = x @ x.mT
        y = torch.softmax(capped(scores) if self.of_scores else scores, -1) @ x
        return y if self.of_scores else capped(y)


def test_a_cap_far_above_the_scores_is_doubted_and_larger_scores_are_the_remedy():
    tried = try_on(Capped(50.0), 0.01 * X)
    assert tried.doubts == ["softcap"]
    assert "(the tanh) that is left out or wrong, because no argument of it is" in tried.said
    assert "to reveal it, use scores about as large as the cap" in tried.said
    assert try_on(Capped(50.0), 4 * X)[:2] == QUIET
    assert try_on(Capped(5.0))[:2] == QUIET


def test_a_cap_of_outputs_is_a_doubt_by_its_name_and_else_a_note():
    module = Capped(1e5, of_scores=False)
    tried = try_on(module)
    assert tried[:2] == ([], ["tanh"])
    assert "a port without the tanh would pass: no argument of it is larger than" in tried.said
    module.final_logit_softcapping = 1e5
    assert try_on(module)[:2] == (["softcap"], [])
    assert try_on(Capped(5.0, of_scores=False))[:2] == QUIET


class Branch(torch.nn.Module):
    """A tanh in a branch that a matrix multiplies, which is 0 where training starts."""

    def __init__(self, up, in_place=False):
        super().__init__()
        self.down, self.up = torch.nn.Linear(D, 3), torch.nn.Linear(3, D, bias=False)
        torch.nn.init.constant_(self.up.weight, up)
        self.tanh = torch.tanh_ if in_place else torch.tanh

    def forward(self, x):
        return x + self.up(self.tanh(self.down(x)))


@pytest.mark.parametrize("in_place", [False, True])
def test_a_tanh_is_seen_where_it_writes_in_place_and_in_gradients(in_place):
    torch.manual_seed(0)
    assert "tanh" not in try_on(Branch(0.1, in_place)).notes
    assert "tanh" not in try_on(Branch(0.0, in_place), gradients=True).notes
    tried = try_on(Branch(0.0, in_place))
    assert "tanh" in tried.notes
    assert "changes no compared tensor by more than rounding; to show it, use outp" in tried.said
    small = try_on(Branch(0.1, in_place).requires_grad_(False), 1e-3 * X)
    assert "tanh" not in small.notes  # the bias alone is large enough


def test_a_cap_that_shows_does_not_vouch_for_another():
    class Both(torch.nn.Module):
        def __init__(self, cap):
            super().__init__()
            self.scores, self.outputs = Capped(cap), Capped(5.0, of_scores=False)

        def forward(self, x):
            return self.outputs(self.scores(x))

    class Layers(torch.nn.Module):
        def __init__(self, cap):
            super().__init__()
            self.layers = torch.nn.ModuleList([Both(cap)])

        def forward(self, x):
            return self.layers[0](x)

    assert try_on(Layers(4.0))[:2] == QUIET
    alone = try_on(Layers(1e5))
    assert alone[:2] == ([], ["tanh"])  # of one class and place: alike in every layer
    assert "a port without the tanh in `layers.0.scores` alone would pass" in alone.said

    class Other(Capped):
        pass

    module = Layers(1e5)
    module.layers[0].outputs = Other(5.0, of_scores=False)
    assert "a softcap (the tanh in `layers.0.scores`)" in try_on(module).said


# --- why a softmax hides what it does -------------------------------------------------------------


class Attends(torch.nn.Module):
    def forward(self, x):
        return torch.softmax(x @ x.mT, -1) @ x


def test_a_saturated_softmax_is_called_so_and_smaller_scores_are_the_remedy():
    tried = try_on(Attends(), 30 * X)
    assert ("scale" in tried.doubts, "mask-edge" in tried.doubts) == (True, False)
    assert "a scale of the scores 1% too large, because the softmax is saturated" in tried.said
    assert "to reveal it, use smaller scores, by smaller inputs or weights" in tried.said
    assert try_on(Attends())[:2] == QUIET


def test_of_scores_that_no_kernel_makes_twice_alike_the_inputs_are_too_large():
    """Their rounding alone, 1e8 of 2**24, is a factor of the weights that a fused kernel makes."""
    assert try_on(Attends(), 1e4 * X)[:2] == ([], ["drowned"])


CAUSES = {
    "one key": (X[:, :1], "each query sees a single key; to reveal it, use several keys"),
    "alike": (
        np.ones((B, T, D)),
        "the scores hardly differ from key to key; to reveal it, use inputs",
    ),
}


@pytest.mark.parametrize("row", CAUSES)
def test_what_hides_a_scale_is_the_true_cause(row):
    x, cause = CAUSES[row]
    assert f"a scale of the scores 1% too large, because {cause}" in try_on(Attends(), x).said


def test_values_that_are_alike_are_named_where_the_scores_differ():
    class OfOnes(torch.nn.Module):
        def forward(self, x):
            return torch.softmax(x @ x.mT, -1) @ (0 * x + 1)

    assert "1% too large, because the values hardly differ from key to key" in try_on(OfOnes()).said
