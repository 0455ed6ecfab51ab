"""What canaries say of a reference and its inputs alone: masks, positions, one softmax of several.

Each row is a torch function as the reference; no port takes part.
"""

import warnings

import numpy as np
import pytest
import torch

from helpers.parity.canary_trials import QUIET, attend, try_on
from jax_attn.parity.checking.canaries import softmaxes

B, T, S, D = 2, 7, 5, 3
rng = np.random.default_rng(0)
X, MEMORY = rng.standard_normal((B, T, D)), rng.standard_normal((B, S, D))
UNIFORM, SHOWN = np.ones((B, T, D)), np.tri(T) - np.eye(T, k=-3)


# --- masks ----------------------------------------------------------------------------------------


def only(x, mask):
    return attend(x, x, x, mask)


def added(x, mask):
    return attend(x, x, x, added=mask)


def hidden(x, mask):
    return attend(x, x, x, 1 - mask)


HIDES_NOTHING = {
    "booleans": (only, "shown", np.ones((T, T), bool)),
    "integers": (only, "shown", np.ones((T, T), int)),
    "integers, of which 1 hides": (hidden, "ignored", np.zeros((T, T), int)),
    "floats": (only, "shown", np.ones((T, T))),
    "added zeros": (added, "attn_bias", np.zeros((T, T))),
    "padding": (lambda x, mask: only(x, mask[:, None]), "real", np.ones((B, T), int)),
}


@pytest.mark.parametrize("by", ["name", "place"])
@pytest.mark.parametrize("row", HIDES_NOTHING)
def test_a_mask_that_hides_nothing_is_met_by_whatever_name(row, by):
    call, name, mask = HIDES_NOTHING[row]
    inputs = {"x": X, name: mask} if by == "name" else (X, mask)
    tried = try_on(lambda *args, **kwargs: call(*args, *kwargs.values()), inputs)
    assert "ignored-mask" in tried.doubts
    label = name if by == "name" else "1"
    assert f"that mask {label!r} is ignored, because it is {mask.flat[0]} everywhere" in tried.said


@pytest.mark.parametrize("name", ["attention_mask", "allowed", "keep_tokens"])
def test_a_mask_of_no_softmax_is_known_by_its_name(name):
    def by_hand(x, mask):
        weights = torch.exp(x @ x.mT) * mask
        return weights / weights.sum(-1, keepdim=True) @ x

    tried = try_on(lambda x, **mask: by_hand(x, *mask.values()), {"x": X, name: SHOWN**0})
    assert "ignored-mask" in tried.doubts


SEEN = {
    "floats that hide": (only, SHOWN),
    "integers that hide": (only, SHOWN.astype(int)),
    "-inf": (added, np.where(SHOWN == 1, 0, -np.inf)),
    "the lowest": (added, np.where(SHOWN == 1, 0, np.finfo(np.float32).min)),
    "a bias of both signs": (added, rng.standard_normal((T, T))),
    "a bias that falls with distance": (added, -np.abs(np.subtract.outer(range(T), range(T)) / T)),
}
TABLE = torch.from_numpy(rng.standard_normal((2, D)))
NO_MASK = {
    "token types, all 0": (lambda x, kind: only(x + TABLE[kind], None), np.zeros((B, T), int)),
    "token types, all 1": (lambda x, kind: only(x + TABLE[kind], None), np.ones((B, T), int)),
    "a gain of 1": (lambda x, gain: only(gain * x, None), np.ones(D)),
    "an offset of 0": (lambda x, offset: only(x, None) + offset, np.zeros(D)),
    "a cache of zeros": (
        lambda x, past: attend(x, torch.cat([past, x], 1), torch.cat([past, x], 1)),
        np.zeros((B, 4, D)),
    ),
    "an index of one row": (lambda x, row: only(x + TABLE[:1][row], None), np.zeros((B, T), int)),
}
NEUTRAL = {"a gain of 1", "an offset of 0", "a cache of zeros"}


@pytest.mark.slow
@pytest.mark.parametrize("row", [*SEEN, *NO_MASK])
def test_a_mask_that_matters_and_what_is_none_are_not_doubted(row):
    call, value = (SEEN | NO_MASK)[row]
    tried = try_on(lambda x, other: call(x, other), {"x": X, "other": value})
    notes = ["neutral-input"] if row in NEUTRAL else []
    assert tried[:2] == ([], notes)
    if row in SEEN:
        assert try_on(lambda x, mask: call(x, mask), {"x": X, "mask": value})[:2] == QUIET


def test_a_mask_that_the_reference_refuses_is_noted_and_not_doubted():
    keep = np.array([[1, 0, 1, 0, 0, 1, 0], [0, 1, 1, 0, 1, 0, 0]], bool)  # three in each row

    def gathered(x, keep):
        return x[keep].reshape(B, 3, D) * 2

    tried = try_on(gathered, {"x": X, "keep": keep})
    assert (tried.doubts, {*tried.notes} >= {"mask-not-tried"}) == ([], True)
    assert "that mask 'keep' is inverted was not checked: the reference raises" in tried.said

    def strict(x, keep):
        if not keep.any():
            raise ValueError("no token is left")
        return attend(x, x, x, keep[:, None])

    assert try_on(strict, {"x": X, "keep": keep})[:2] == ([], ["mask-not-tried"])
    assert "ignored-mask" in try_on(strict, {"x": X, "keep": keep | True}).doubts


def test_a_mask_is_turned_within_what_float16_holds():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mask = np.where(SHOWN == 1, 0, -1e4)
        assert try_on(added, {"x": X, "mask": mask}, "float16")[:2] == QUIET


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


@pytest.mark.parametrize("by", ["name", "place", "a call's place"])
def test_a_mask_is_known_by_its_parameter(by):
    class Masked(torch.nn.Module):
        def forward(self, x, attention_mask):
            return attend(x, x, x, attention_mask[:, None])

    real = (np.arange(T) < np.array([[T], [4]])).astype(int)
    call = (lambda x, mask: Masked()(x, mask)) if by == "a call's place" else Masked()
    inputs = {"x": X, "attention_mask": real} if by == "name" else (X, real)
    assert "mask-one-end" in try_on(call, inputs).standing


def test_a_mask_of_any_name_is_known_by_what_it_hides():
    real = (np.arange(T) < np.array([[T], [4]])).astype(int)
    tried = try_on(lambda x, m: attend(x, x, x, m[:, None]), {"x": X, "m": real})
    assert "mask-one-end" in tried.standing


SEGMENTS = np.array([[0, 0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1, 1]])


def test_segments_of_two_numbers_are_no_mask():
    def within(x, ids):
        return attend(x, x, x, ids[:, None] == ids[..., None])

    tried = try_on(within, {"x": X, "ids": SEGMENTS})
    assert {"inverted-mask", "ignored-mask"}.isdisjoint(tried.doubts)


def test_keys_are_doubted_if_no_drawn_inputs_can_be_tried():
    def of_logarithms(x):
        return attend(x.log(), x.log(), x.log())

    assert "other-keys" in try_on(of_logarithms, (UNIFORM,)).doubts


def test_a_softmax_without_keys_or_axes_is_left_alone():
    def experts(x):
        return x + x[:0].softmax(-1).sum() + x.mean().softmax(0)

    assert try_on(experts, (X,)).doubts == []
