"""Branches of a reference that never act are notes, and the input that is named makes them act."""

import numpy as np
import pytest
import torch
from torch.nn import functional

from helpers.parity.canary_trials import try_on

B, T, D = 2, 7, 3
rng = np.random.default_rng(0)
X = rng.standard_normal((B, T, D))
AT = torch.arange(2 * T)
KEEP = np.array([[1, 1, 1, 1, 1, 1, 1], [1, 0, 1, 1, 0, 1, 0]], bool)


def notes_on(call, **inputs) -> list[str]:
    """The notes, but that of a reference without a softmax."""
    said = try_on(call, {"x": X} | inputs).said.splitlines()
    return [line for line in said if not line.startswith(("blind", "the reference calls no softm"))]


def distances(x):
    """Relative positions beyond 8 are taken for 8."""
    at = AT[: x.shape[1]]
    return x + (at[:, None] - at).clip(-8, 8).to(x).tanh().sum(-1)[:, None]


def assigned(x):
    x = x.clone()
    x[x > 2] = 2.0
    return x


F = functional
TEN, BIG = 9 * X, 99 * X
# name -> (the reference, an input on which it acts, the branch, what the note says shows it)
IDLE = {
    "a clip": (lambda x: x.clip(-8, 8), TEN, "clamp(max=8) (", "a number above 8"),
    "its lower side": (lambda x: x.clip(-8, 8), TEN, "clamp(min=-8) (", "a number below -8"),
    "relu6": (lambda x: F.relu6(x), TEN, "hardtanh(max=6) (", "a number above 6"),
    "hardtanh": (lambda x: F.hardtanh(x, -5, 5), TEN, "hardtanh(max=5)", "5"),
    "relu": (torch.relu, X, "relu (", "a number below 0"),
    "a distance": (distances, np.concatenate([X, X], 1), "clamp(max=8)", "longer sequences"),
    "maximum": (lambda x: x.maximum(torch.tensor(-2.0).to(x)), TEN, "maximum(min=-2)", "below -2"),
    "minimum of two": (
        lambda x: torch.minimum(x, 2 * x),
        TEN,
        "the second argument of minimum",
        "the first argument is the larger one",
    ),
    "where": (lambda x: torch.where(x > 2, 3 * x, x), TEN, "the first argument of wh", "is True"),
    "nan_to_num": (torch.nan_to_num, np.where(X > 1, np.nan, X), "nan_to_num (", "is not finite"),
    "threshold": (lambda x: F.threshold(x, -2, 0.0), TEN, "threshold(-2)", "of -2 or less"),
    "hardshrink": (lambda x: F.hardshrink(x, 0.05), X / 9, "hardshrink(0.05)", "between -0.05"),
    "softshrink": (lambda x: F.softshrink(x, 0.05), X / 9, "softshrink(0.05)", "and 0.05"),
    "remainder": (lambda x: torch.remainder(x, 5), TEN, "remainder(5)", "below 0, or of 5"),
    "fmod": (lambda x: torch.fmod(x, 5), TEN, "fmod(5)", "a number of 5 or more"),
    "floor": (lambda x: x + torch.floor(x / 9), TEN, "floor (", "takes to several steps"),
    "bucketize": (
        lambda x: x * (torch.bucketize(x, torch.tensor([2.0]).to(x)) + 1),
        TEN,
        "bucketize (",
        "takes to several steps",
    ),
    "celu": (lambda x: F.celu(x), X, "celu (", "a number below 0"),
    "elu": (lambda x: F.elu(x), X, "elu (", "a number below 0"),
    "leaky_relu": (lambda x: F.leaky_relu(x), X, "leaky_relu (", "a number below 0"),
    "prelu": (lambda x: F.prelu(x, torch.tensor([0.1]).to(x)), X, "prelu (", "a number below 0"),
    "relu of what is below 0": (
        lambda x: x - torch.relu(x - 9),
        BIG,
        "the argument of relu (",
        "a number above 0",
    ),
    "a clamp that gives its bound": (
        lambda x: x / (x.amax() / 9).clamp(min=1.0),
        BIG,
        "the argument of clamp (",
        "a number above 1",
    ),
    "a clip that gives one bound": (
        lambda x: x * (x - 9).clip(-2, 2),
        TEN,
        "the argument of clamp (",
        "a number above -2 and below 2",
    ),
    "abs": (torch.abs, X, "abs (", "a number below 0"),
    "sign": (lambda x: x * torch.sign(x), X, "sign (", "a number below 0"),
    "a factor": (lambda x: x * (x < 2), TEN, "a condition taken as a number (", "is False"),
    "a cast factor": (lambda x: x - (x > 2).to(x), TEN, "a condition taken as a nu", "is True"),
    "masked_scatter": (lambda x: x.masked_scatter(x > 2, 0 * x), TEN, "masked_scatter (", "True"),
    "an assignment": (assigned, TEN, "an assignment to what a mask selects", "mask is True"),
    "a mask of its own": (
        lambda x: torch.softmax((x @ x.mT).masked_fill(x[..., :1] > 2, -torch.inf), -1) @ x,
        TEN,
        "masked_fill (",
        "a key that it hides",
    ),
}
TAME = np.clip(abs(X), 0.1, 1.5)


@pytest.mark.parametrize("row", IDLE)
def test_a_branch_that_never_acts_is_noted_and_the_input_named_is_the_remedy(row):
    call, acting, operator, what = IDLE[row]
    tried = try_on(call, {"x": TAME})
    wanted = [note for note in tried.said.splitlines() if note.startswith(operator)]
    assert "idle-branch" in tried.notes
    assert any(".py:" in note and what in note for note in wanted)
    assert {*wanted}.isdisjoint(notes_on(call, x=acting))


def test_guards_are_one_note_and_an_empty_row_removes_it():
    def pooled(x, keep):
        mean = (x * keep[..., None]).sum(1) / keep.sum(1, keepdim=True).to(x).clamp(min=1e-9)
        return torch.nn.functional.normalize(mean, dim=-1)

    (note,) = notes_on(pooled, keep=KEEP)
    assert note.startswith("clamp(min=1e-09) (")
    assert " guard against zero and never take effect, so a port without them" in note
    assert "idle-guard" in try_on(pooled, {"x": X, "keep": KEEP}).notes
    assert notes_on(pooled, keep=KEEP & np.array([[True], [False]])) == []


def put(x, at, value):
    x = x.clone()
    x[at] = value
    return x


QUIET = {
    "a mask's where": lambda x, keep: torch.where(keep[..., None], x, 0.0),
    "a mask's fill": lambda x, keep: x.masked_fill(~keep[..., None], 0.0),
    "a mask's product": lambda x, keep: x * keep.to(x)[..., None],
    "a count": lambda x, keep: x + keep.long().cumsum(1).clamp(min=0)[..., None],
    "what keeps a number finite": lambda x, keep: (
        x.clamp(min=torch.finfo(torch.float32).min) * keep[..., None]
    ),
    "an assignment by a mask": lambda x, keep: put(x, ~keep, 0.0),
    "an assignment by place": lambda x, keep: put(x, [0], x[1:] * keep[:1, :, None]),
    "both sides": lambda x, keep: x.clip(-0.5, 0.5).relu() * keep[..., None],
    "both signs": lambda x, keep: (x.abs() + x.sign()) * keep[..., None],
    "what is counted": lambda x, keep: x + keep.sum(1).clamp(max=2).abs()[:, None, None],
}


@pytest.mark.parametrize("row", QUIET)
def test_what_acts_or_cannot_is_not_noted(row):
    assert notes_on(QUIET[row], keep=KEEP) == []


@pytest.mark.parametrize(("positions", "is_standing"), [(9, True), (8, False)])
def test_a_distance_that_comes_to_its_bound_and_not_beyond_is_a_standing_note(
    positions, is_standing
):
    tried = try_on(distances, {"x": rng.standard_normal((B, positions, D))})
    assert "clamp(max=8)" in tried.said
    assert ("idle-branch" in tried.standing) is is_standing


@pytest.mark.parametrize("row", ["a mask's where", "a mask's product"])
def test_a_mask_that_is_all_true_is_its_own_canarys_business(row):
    """The doubt names the mask; the branch that it makes act gives no note beside."""
    tried = try_on(QUIET[row], {"x": X, "keep": np.ones((B, T), bool)})
    assert (tried.doubts, tried.notes) == (["ignored-mask"], ["no-softmax"])


def test_layers_alike_are_one_note_that_names_them():
    layers = torch.nn.Sequential(*(torch.nn.Hardtanh(-9, 9) for _ in range(4)))
    said = try_on(layers, (10 * X - 5 * abs(X),)).said
    assert said.count("hardtanh(max=9) in `0`, `1` and 2 more (") == said.count("(max=9)") == 1
