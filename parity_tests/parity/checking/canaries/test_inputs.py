"""What canaries say of a reference and its inputs alone: positions, one softmax of several.

Each row is a torch function as the reference; no port takes part.
"""

import numpy as np
import pytest
import torch

from helpers.parity.canary_trials import QUIET, attend, try_on
from jax_attn.parity.checking.canaries import softmaxes

B, T, S, D = 2, 7, 5, 3
rng = np.random.default_rng(0)
X, MEMORY = rng.standard_normal((B, T, D)), rng.standard_normal((B, S, D))
UNIFORM, SHOWN = np.ones((B, T, D)), np.tri(T) - np.eye(T, k=-3)


# --- positions ------------------------------------------------------------------------------------


def by_hand(x):
    weights = torch.exp(x @ x.mT)
    return weights / weights.sum(-1, keepdim=True) @ x


def causal_by_hand(x):
    weights = torch.exp(x @ x.mT).tril()
    return weights / weights.sum(-1, keepdim=True) @ x


UNSEEN = "which positions the port mixes, and how, because input 'x' is the same all along its axis"


@pytest.mark.parametrize("call", [by_hand, causal_by_hand])
def test_attention_by_hand_over_tokens_that_are_alike_is_doubted(call):
    assert f"{UNSEEN} 1" in try_on(call, {"x": UNIFORM}).said
    assert f"{UNSEEN} 0" in try_on(call, {"x": UNIFORM[0]}).said
    assert try_on(call, {"x": UNIFORM[0]}).doubts == ["positions"]
    assert try_on(call, {"x": X}).doubts == []


def test_log_softmax_is_a_softmax():
    def call(x):
        return torch.log_softmax(x @ x.mT, -1).exp() @ x

    assert "scale" in try_on(call, {"x": UNIFORM}).doubts
    assert try_on(call, {"x": X})[:2] == QUIET


KERNEL = torch.from_numpy(rng.standard_normal((D, D, 3)))


def recurrent(x):
    states = [torch.zeros_like(x[:, 0])]
    for at in range(T):
        states.append(torch.tanh(x[:, at] + states[-1]))
    return torch.stack(states[1:], 1)


WITHOUT_ATTENTION = {
    "a layer": lambda x: x @ KERNEL[0].to(x),
    "a convolution": lambda x: torch.conv1d(x.mT, KERNEL.to(x), padding=1).mT,
    "a pooling": lambda x: x.mean(1),
    "a running sum": lambda x: x.cumsum(1),
    "a recurrence": recurrent,
}


@pytest.mark.parametrize("x", [UNIFORM, X], ids=["uniform", "drawn"])
@pytest.mark.parametrize("name", WITHOUT_ATTENTION)
def test_what_is_no_attention_is_not_doubted(name, x):
    assert try_on(WITHOUT_ATTENTION[name], {"x": x})[:2] == ([], ["no-softmax"])


# --- one softmax of several -----------------------------------------------------------------------


def both(x, memory):
    return (y := attend(x, x, x)) + attend(y, memory, memory)


@pytest.mark.parametrize(
    "memory", [MEMORY[:, :1], np.repeat(MEMORY[:, :1], S, 1)], ids=["one key", "keys alike"]
)
def test_a_softmax_that_shows_it_does_not_vouch_for_another(memory):
    tried = try_on(both, {"x": X, "memory": memory})
    assert tried.doubts == ["scale"]
    assert "a scale of the scores 1% too large in softmax 2 of 2 alone" in tried.said
    assert try_on(both, {"x": X, "memory": MEMORY})[:2] == QUIET


class Attends(torch.nn.Module):
    def forward(self, x, memory):
        return attend(x, memory, memory)


@pytest.mark.parametrize(("several", "doubt"), [(1, ""), (2, "in softmax 2 of 2 alone")])
def test_a_module_called_twice_has_its_bug_in_both(several, doubt):
    """In the one call it shows; were they two, the other's would not."""
    modules = torch.nn.ModuleList(Attends() for _ in range(several))

    def call(x, memory):
        return modules[0](x, memory) + modules[-1](x, memory[:, :1])

    tried = try_on(call, {"x": X, "memory": MEMORY})
    assert tried.doubts == (["scale"] if doubt else [])
    assert doubt in tried.said


class AttendsTwice(torch.nn.Module):
    def forward(self, x, memory):
        return both(x, memory)


def test_nor_does_it_within_one_module():
    module = AttendsTwice()
    tried = try_on(lambda x, memory: module(x, memory), {"x": X, "memory": MEMORY[:, :1]})
    assert "in softmax 2 of 2 alone" in tried.said


def test_a_softmax_over_the_queries_may_be_the_right_one():
    def call(x):
        return torch.softmax(x @ x.mT / D, -2).mT @ x

    assert try_on(call, {"x": X})[:2] == QUIET


def test_weights_that_the_reference_refuses_are_a_note():
    def call(x):
        weights = torch.softmax(x @ x.mT, -1)
        if not torch.equal(weights, right):
            raise ValueError("these are not the weights")
        return weights @ x

    x = torch.from_numpy(X).double()
    right = torch.softmax(x @ x.mT, -1)
    tried = try_on(call, {"x": X})
    assert "bug-not-tried" in tried.standing
    assert "whether these inputs would reveal a scale of the scores" in tried.said


def test_a_low_precision_need_not_show_a_scale_in_each_alone():
    """What one layer of several adds may be as small as a rounding, its inputs in order."""

    def call(x, memory):
        return attend(x, x, x) + 0.003 * attend(x, memory, memory)

    assert try_on(call, {"x": X, "memory": MEMORY}, "bfloat16")[:2] == QUIET

    def tiny(x, memory):
        return 1e-20 * call(x, memory)

    assert try_on(tiny, {"x": X, "memory": MEMORY}, "bfloat16")[:2] == QUIET
    tried = try_on(call, {"x": X, "memory": MEMORY[:, :1]}, "bfloat16")
    assert "a scale of the scores twice too large in softmax 2 of 2 alone" in tried.said


def test_a_row_that_sees_no_key_does_not_vouch_for_the_others():
    def call(x, allowed):
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, allowed)

    allowed = np.ones((B, T, T), bool)
    allowed[0, 0] = False
    assert "scale" in try_on(call, {"x": UNIFORM, "allowed": allowed}).doubts


def test_of_many_those_are_tried_alone_that_moved_least(monkeypatch):
    monkeypatch.setattr(softmaxes, "ALONE", 1)
    tried = try_on(both, {"x": X, "memory": MEMORY[:, :1]})
    assert (tried.doubts, tried.standing) == (["scale"], ["few-tried"])
    assert "\na wrong scale of one softmax alone was tried in 1 of 2" in tried.said


def routed(x):
    return x * (1 + x.softmax(-1).argmax(-1, keepdim=True))


def unused(x):
    x.softmax(-1)
    return 2 * x


@pytest.mark.parametrize("call", [routed, unused])
def test_a_softmax_that_only_chooses_is_noted_and_not_doubted(call):
    tried = try_on(call, {"x": X})
    assert (tried.doubts, tried.notes[-1]) == ([], "softmax-unused")
    assert "the weights of softmax 1 of 1 do not affect any output" in tried.said
    assert "scale" in try_on(lambda x: attend(call(x), 1 + 0 * x, 1 + 0 * x), {"x": X}).doubts


def test_weights_times_zero_are_used_all_the_same():
    assert "scale" in try_on(lambda x: x + attend(x, x, 0 * x), {"x": X}).doubts


# --- what no input shows --------------------------------------------------------------------------


def entropy(x):
    return -(x.softmax(-1) * x.log_softmax(-1)).sum(-1)


def divergence(x):
    other = x.flip(-2)
    return (x.softmax(-1) * (x.log_softmax(-1) - other.log_softmax(-1))).sum(-1)


@pytest.mark.parametrize("call", [entropy, divergence])
def test_sums_over_all_keys_are_not_doubted(call):
    tried = try_on(call, (X,))
    assert tried.doubts == []
    assert "other-keys" in tried.standing


def contrastive(x):
    """The loss of pairs in both directions, which stays the same if these are exchanged."""
    scores, pairs = x[0] @ x[1].mT, torch.arange(x.shape[1])
    losses = [torch.nn.functional.cross_entropy(s, pairs) for s in (scores, scores.mT)]
    return sum(losses)


def test_a_loss_of_both_directions_is_not_doubted():
    tried = try_on(contrastive, (X,))
    assert tried.doubts == []
    assert "softmax-over-queries" in tried.standing
    one = try_on(lambda x: attend(x, x, x), (UNIFORM,))
    assert "softmax-over-queries" in one.doubts


def test_keys_that_are_alike_are_doubted_where_others_would_show():
    assert "other-keys" in try_on(lambda x: attend(x, x, x), (UNIFORM,)).doubts


def test_keys_are_doubted_if_no_drawn_inputs_can_be_tried():
    def of_logarithms(x):
        return attend(x.log(), x.log(), x.log())

    assert "other-keys" in try_on(of_logarithms, (UNIFORM,)).doubts


def test_a_softmax_without_keys_or_axes_is_left_alone():
    def experts(x):
        return x + x[:0].softmax(-1).sum() + x.mean().softmax(0)

    assert try_on(experts, (X,)).doubts == []
