"""Modules that decide: the oracle and perturbed runs decide as the reference does."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

from helpers.parity.deciding_pairs import (
    BUCKETS_LAYOUT,
    EXPERTS_LAYOUT,
    D,
    FlaxBuckets,
    FlaxExperts,
    TorchBuckets,
    TorchExperts,
    loaded,
    tokens,
)
from helpers.parity.findings import kinds, sentences
from helpers.parity.functions import PortFunction, TorchFunction
from helpers.parity.one_reference import Once
from jax_attn.parity import Verdict, check
from jax_attn.parity.checking.prepared import Prepared
from jax_attn.parity.run.inputs_and_runs import Inputs
from jax_attn.parity.run.reference import Reference

ONCE = Once()


def checked(reference, port, layout):
    pair = loaded(reference, port, layout)
    return check(*pair, (tokens(),), layout=layout, transforms=("jit",))


def prepared(module, *inputs, dtype="float32"):
    given = inputs or (tokens().astype(np.float32),)
    return Prepared(Reference(module, None, Inputs(given, {})), dtype)


@pytest.fixture(scope="module")
def buckets():
    torch.manual_seed(0)
    return TorchBuckets()


CAST = re.compile(
    r"the reference's cast to int64 at \w+\.py:\d+ lies within rounding of another value at"
)


@pytest.mark.slow
def test_buckets_at_exact_powers_are_the_references_and_a_note_says_so(buckets):
    result = checked(buckets, FlaxBuckets(), BUCKETS_LAYOUT)
    assert result.verdict is Verdict.PASS, str(result)
    (note,) = sentences(result, "near-decision")
    assert CAST.match(note)
    assert "near-decision" in kinds(result, "standing note"), "strict lets it be"


@pytest.mark.slow
def test_buckets_of_distances_one_too_large_fail_and_the_decision_is_among_the_reasons(buckets):
    result = checked(buckets, FlaxBuckets(off_by_one=True), BUCKETS_LAYOUT)
    assert result.verdict is Verdict.FAIL
    assert "near-decision" in kinds(result, "doubt")


def test_budgets_are_those_of_buckets_that_are_a_table(buckets):
    frozen = TorchBuckets(frozen=True)
    frozen.load_state_dict(buckets.state_dict())
    ours, theirs = (prepared(module).budgets["output"]["output"] for module in (buckets, frozen))
    assert ours.rms <= 3 * theirs.rms


@pytest.mark.slow
def test_experts_that_no_rounding_swaps_are_judged_without_a_word(monkeypatch):
    ONCE.patch(monkeypatch)
    torch.manual_seed(0)
    module = TorchExperts()
    right, swapped = (checked(module, FlaxExperts(x), EXPERTS_LAYOUT) for x in (False, True))
    assert (right.verdict, swapped.verdict) == (Verdict.PASS, Verdict.FAIL), str(right)
    assert "rounding" not in f"{right}{swapped}"


@pytest.mark.slow
def test_experts_that_tie_are_named_and_a_port_that_takes_the_other_does_not_fail():
    torch.manual_seed(0)
    module = TorchExperts()
    with torch.no_grad():
        module.gate.weight[1] = module.gate.weight[0]
        module.gate.bias[:2] = torch.tensor([0.5, 0.5 + 2.0**-24])
    result = checked(module, FlaxExperts(), EXPERTS_LAYOUT)
    assert result.verdict is not Verdict.FAIL
    assert any("topk" in line for line in sentences(result, "near-decision"))


T = 17  # positions


class Powers(nn.Module):
    """x times the integer part of log_b(b**n), which is n or n - 1 as the logarithms round."""

    def forward(self, x):
        base = torch.arange(2, 2 + D)
        logs = [torch.log((base**n).to(x.dtype)) / torch.log(base.to(x.dtype)) for n in range(1, 8)]
        return x * torch.stack(logs).long().sum(0)


class PowersInPlace(Powers):
    def forward(self, x):
        base = torch.arange(2, 2 + D)
        logs = [torch.log((base**n).to(x.dtype)) / torch.log(base.to(x.dtype)) for n in range(1, 8)]
        return x * sum(log.floor_() for log in logs)


@pytest.mark.parametrize("module", [Powers(), PowersInPlace()])
def test_the_oracle_decides_as_the_reference_does_in_its_own_dtype(module):
    side = prepared(module)
    own = side.own.kinds["output"]["output"]
    assert side.judge_one("output", "output", "own", own).verdict is Verdict.PASS
    (sentence,) = side.near_decisions
    assert ("floor" if isinstance(module, PowersInPlace) else "cast to int64") in sentence
    by_itself = module.double()(torch.from_numpy(side.reference.inputs.args[0]).double()).numpy()
    found = side.judge_one("output", "output", "float64, which decides otherwise", by_itself)
    assert found.verdict is Verdict.FAIL


class Masked(nn.Module):
    """Decides about integers alone."""

    def forward(self, x):
        later = torch.arange(x.shape[-2])[:, None] < torch.arange(x.shape[-2])
        return torch.softmax((x @ x.mT).masked_fill(later, -1e9), -1) @ x


def test_decisions_about_integers_are_not_recorded():
    reference = prepared(Masked()).reference
    assert reference._decisions == []
    assert reference.near_decisions == ()


def regions(x, dtype):
    """Which positions are in other regions, by a difference of numbers of `dtype`."""
    ids = x.new_zeros(T, dtype=dtype)
    ids[5:], ids[11:] = 1, 2
    return ids[:, None] - ids != 0


def counts(x, dtype):
    """Which positions share none of three properties, by a product of `dtype`."""
    has = torch.arange(T)[:, None] % torch.tensor([2, 3, 5]) == 0
    has = x.new_zeros(T, 3, dtype=dtype).masked_fill(has, 1)
    return has @ has.mT == 0


def steps(x, dtype):
    """Which positions are in other powers of two; floats by logarithms of a `torch.tensor`."""
    after = torch.arange(1, T + 1)
    if dtype is torch.int64:
        step = torch.log2(after.double()).ceil().long()
    else:
        step = torch.ceil(torch.log(after) / torch.log(torch.tensor(2.0))).long()
    return step[:, None] != step


class Apart(nn.Module):
    def __init__(self, apart, dtype):
        super().__init__()
        self.apart = apart
        self.dtype = dtype

    def forward(self, x):
        scores = (x @ x.mT).masked_fill(self.apart(x, self.dtype), -100.0)
        return torch.softmax(scores, -1) @ x


@pytest.mark.parametrize("apart", [regions, counts, steps])
def test_what_small_integers_in_floats_decide_is_as_exact_as_integers(apart):
    x = np.random.default_rng(0).standard_normal((T, 3)).astype(np.float32)
    sides = [prepared(Apart(apart, dtype), x) for dtype in (torch.float32, torch.int64)]
    ours, theirs = (side.budgets["output"]["output"] for side in sides)
    assert ours.rms <= 2 * theirs.rms
    own = sides[0].own.kinds["output"]["output"]
    assert sides[0].judge_one("output", "output", "own", own).verdict is Verdict.PASS


class Fickle(nn.Module):
    """Rounds once more in float64."""

    def forward(self, x):
        y = torch.floor(x)
        return torch.ceil(x) + y if x.dtype is torch.float64 else y + torch.trunc(x)


def test_another_order_of_decisions_is_told():
    (sentence,) = prepared(Fickle()).near_decisions[-1:]
    assert "in another order" in sentence


class Rounded(nn.Module):
    """Rounds what it made of its input, in place."""

    def forward(self, x):
        return x * (4 * x).floor_()


def test_a_decision_in_place_about_an_input_is_seen_and_is_the_runs_own():
    x = np.arange(-6, 7, dtype=np.float32)[:, None] / 4
    side = prepared(Rounded(), x)
    (sentence,) = side.near_decisions
    assert "reference's floor at test_decisions.py:" in sentence
    (floor,) = side.reference._decisions
    assert not floor.constant


TAKEN = {
    # name -> reference, and a right port that takes the first of numbers that bfloat16 makes equal
    "amax": (lambda x: x.amax(1), lambda x: jnp.take_along_axis(x, x.argmax(1)[:, None], 1)[:, 0]),
    "kthvalue": (lambda x: x.kthvalue(12, 1).values, lambda x: jnp.sort(x, 1)[:, 11]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TAKEN)
def test_numbers_that_a_narrow_dtype_makes_equal_may_be_taken_in_another_order(name):
    rng = np.random.default_rng(4)
    x, w = (rng.standard_normal(shape).astype(np.float32) for shape in ((5, 13, 16), (16, 37)))
    of_torch, of_jax = TAKEN[name]
    reference = TorchFunction(lambda x, w: of_torch((3 * (x @ w)).sigmoid()))
    ports = [
        PortFunction(lambda x, w, by=by: of_jax(by * jax.nn.sigmoid(3 * (x @ w)))) for by in (1, 3)
    ]
    verdicts = [
        check(reference, port, (x, w / 4), transforms=("jit",), dtype="bfloat16").verdict
        for port in ports
    ]
    assert verdicts == [Verdict.INCONCLUSIVE, Verdict.FAIL]
