"""A list of inputs is checked one by one, with one result: each speaks for what it alone shows."""

import jax
import numpy as np
import pytest
import torch
from flax import nnx

from helpers.parity.findings import kinds
from jax_attn import parity
from jax_attn.parity.checking import canaries

F = torch.nn.functional
ODD, EVEN = (
    np.random.default_rng(0).standard_normal((2, 3, *sizes)).astype(np.float32)
    for sizes in ((9, 7), (8, 6))
)


class Strided(torch.nn.Module):
    def forward(self, x):
        return F.conv2d(x, torch.ones(5, 3, 3, 3).to(x), stride=2, padding=1)


class Port(nnx.Module):
    def __init__(self, padding):
        self.padding = padding

    def __call__(self, x):
        weight = np.ones((5, 3, 3, 3), np.float32)
        return jax.lax.conv_general_dilated(x, weight, (2, 2), self.padding)


def checked(padding, *sets):
    return parity.check(Strided(), Port(padding), [*sets], transforms=("jit",), gradients=False)


def test_sizes_that_show_a_mistake_speak_for_those_that_hide_it():
    explicit = ((1, 1), (1, 1))
    alone, both = checked(explicit, (ODD,)), checked(explicit, (ODD,), (EVEN,))
    assert "idle-branch" in kinds(alone)
    assert "idle-branch" not in kinds(both)
    assert both.verdict == "PASS"
    assert len(both.tensors) == 2 * len(alone.tensors)


def test_a_mistake_at_one_size_alone_fails_and_is_named_there():
    assert checked("SAME", (ODD,)).verdict == "PASS"
    result = checked("SAME", (ODD,), (EVEN,))
    failed = {t.transform for t in result.tensors if t.verdict == "FAIL"}
    assert (result.verdict, failed) == ("FAIL", {"jit, inputs[1]"})
    assert result.explain().to_json()["verdict"] == "FAIL"


def test_what_one_alone_cannot_show_is_said_with_its_place():
    """The doubt is of the second inputs; what both say is said once."""
    result = checked(((1, 1), (1, 1)), (ODD,), (np.zeros_like(EVEN),))
    assert result.verdict == "INCONCLUSIVE"
    assert all(reason.startswith(("inputs[1]: ", "jit, inputs[1] ")) for reason in result.reasons)
    assert kinds(result).count("gradients-off") == 1
    scopes = [note for note in result.notes if note.kind == "scope"]
    assert [note[:9] for note in scopes] == ["inputs[0]", "inputs[1]"]


LARGE = np.full((2, 3), 2**40)

WRONG = {
    "an empty list": ([], ValueError, ["inputs: "]),
    "arrays without a tuple": ([ODD, EVEN], TypeError, ["inputs[0]: ", "inputs[1]: "]),
    "integers that JAX narrows": (
        [(ODD,), (LARGE,), (LARGE,)],
        TypeError,
        ["inputs[1]['0']: ", "inputs[2]['0']: "],
    ),
    "a list inside": ([(ODD,), {"x": [1.0]}], TypeError, ["inputs[1]['x']: "]),
}


@pytest.mark.parametrize("row", WRONG)
def test_what_is_wrong_is_told_by_its_place(row):
    given, kind, begins = WRONG[row]
    with pytest.raises(kind) as told:
        checked("SAME", *given)
    lines = str(told.value).splitlines()
    assert len(lines) == len(begins)
    assert all(line.startswith(begin) for line, begin in zip(lines, begins, strict=True))


class Attend(torch.nn.Module):
    def forward(self, x):
        return (x @ x.mT).softmax(-1) @ x


class AttendPort(nnx.Module):
    def __call__(self, x):
        return jax.nn.softmax(x @ x.mT) @ x


VARIED = np.random.default_rng(1).standard_normal((2, 5, 3)).astype(np.float32)
EQUAL = np.broadcast_to(VARIED[:, :1], VARIED.shape).copy()  # all weights are a fifth


@pytest.mark.parametrize(
    ("sets", "asked"),
    [((VARIED, EQUAL), 1), ((EQUAL, VARIED), 2), ((EQUAL, VARIED, EQUAL), 2), ((EQUAL, EQUAL), 2)],
    ids=["revealed first", "hidden first", "revealed second", "never revealed"],
)
def test_later_inputs_are_asked_only_about_bugs_that_earlier_ones_hide(sets, asked, monkeypatch):
    calls = []
    tried = canaries.try_softmaxes
    monkeypatch.setattr(canaries, "try_softmaxes", lambda *a: calls.append(a) or tried(*a))
    given = [(x,) for x in sets]
    result = parity.check(Attend(), AttendPort(), given, transforms=("jit",), gradients=False)
    assert len(calls) == asked
    assert (result.verdict == "PASS") == any(x is VARIED for x in sets), str(result)
