"""Budgets: the quantile, the model of a sum's rounding, and what the perturbed runs do."""

import copy
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from scipy.special import stdtrit
from torch import nn

from jax_attn.parity.judge.budget import (
    APPROXIMATED,
    FALSE_ALARM,
    PRECISIONS,
    RUNS,
    Budget,
    bridge,
    student_quantile,
)
from jax_attn.parity.run.inputs_and_runs import Inputs
from jax_attn.parity.run.modes.sums import ProductErrors
from jax_attn.parity.run.reference import Reference

# Two-sided quantiles from printed tables, to the digits given there.
STUDENT = [(0.05, 2, 4.303), (0.05, 10, 2.228), (0.01, 20, 2.845), (0.001, 4, 8.610)]


@pytest.mark.parametrize(("tail", "freedom", "printed"), STUDENT)
def test_student_quantile_agrees_with_the_printed_tables(tail, freedom, printed):
    assert abs(student_quantile(tail, freedom) - printed) <= 0.5e-3


def test_student_quantile_far_out_is_that_of_its_power_law():
    """With 2 degrees of freedom P(|t| > x) = 1 - x / sqrt(2 + x**2) exactly."""
    t = student_quantile(1e-8, 2)
    # Beside 1e-8, each of 8 roundings of numbers near 1: the root, its square, the quotient, the
    # difference, here and in the quantile.
    assert abs((1 - t / math.sqrt(2 + t * t)) - 1e-8) <= 8 * 2.0**-53


@pytest.mark.parametrize("freedom", [1, 2, 7, 12, 32, 128])
def test_student_quantile_is_scipys(freedom):
    """For the tails of one to 10**10 elements; the sum of 100 roundings of a number up to 128."""
    for tail in (0.5, 1e-6, 1e-10, 1e-16):
        expected = -stdtrit(freedom, tail / 2)
        assert student_quantile(tail, freedom) == pytest.approx(expected, rel=1e-13)


@pytest.mark.parametrize("mean", [0.0, 1.0], ids=["signs differ", "one sign"])
@pytest.mark.parametrize("terms", [7, 101, 1009])
def test_the_bridge_bounds_a_float32_sum_in_sequence_and_not_by_much(terms, mean):
    """A uniform draw up to the bound has RMS bound/sqrt(3): real sums err by no more, on average.

    Nor by less than a fifth of it: a budget that loose would have no power.
    """
    rng = np.random.default_rng(terms)
    x = (mean + rng.standard_normal((400, terms))).astype(np.float32)
    total = np.zeros(400, np.float32)
    for i in range(terms):
        total = total + x[:, i]
    wide = x.astype(np.float64)
    error = total - wide.sum(axis=1)
    of_total, of_squares, _ = bridge(terms, PRECISIONS["float32"])
    bound = np.sqrt(of_total * wide.sum(axis=1) ** 2 + of_squares * (wide**2).sum(axis=1))
    ratio = np.sqrt(np.mean(error**2) / np.mean(bound**2 / 3))
    assert 0.2 <= ratio <= 1.0


# operator -> XLA's, torch's as the definition, up to where it is not yet 0.
APPROXIMATIONS = {
    "erf": (jax.lax.erf, torch.erf, 9),
    "expm1": (jnp.expm1, torch.expm1, 30),
    "log1p": (jnp.log1p, torch.log1p, 1e4),
    "sigmoid": (jax.nn.sigmoid, torch.sigmoid, 30),
    "tanh": (jnp.tanh, torch.tanh, 9),
}


@pytest.mark.parametrize("name", APPROXIMATED)
def test_what_xla_approximates_errs_by_more_than_its_rounding_and_no_more_than_is_allowed(name):
    ours, defined, most = APPROXIMATIONS[name]
    logs = np.random.default_rng(0).uniform(np.log(1e-6), np.log(most), 20_000)
    x = np.concatenate([np.exp(logs), -np.exp(logs)]).astype(np.float32)
    x = x[x > -1] if name == "log1p" else x
    want = defined(torch.from_numpy(x).double()).numpy()
    error = np.abs(np.asarray(jax.jit(ours)(x)) - want) / np.abs(want)
    roundoff = PRECISIONS["float32"].acc
    assert 2 * roundoff < error[want != 0].max() <= APPROXIMATED[name] * roundoff


def test_the_bridge_bounds_what_a_sum_loses_of_terms_too_small_to_be_kept():
    terms, smallest = 101, 2.0**-126
    lost = np.random.default_rng(3).uniform(-smallest, smallest, (400, terms)).sum(axis=1)
    *_, of_terms = bridge(terms, PRECISIONS["float32"])
    assert 0.8 <= np.sqrt(np.mean(lost**2) / (of_terms / 3)) <= 1.2


def run(module, *inputs, dtype="float32"):
    """(exact, own, budgets) of a module on float32 arrays."""
    reference = Reference(module, None, Inputs(inputs, {}))
    shape = reference.outputs(dtype)["output"].shape
    cotangents = {"output": np.random.default_rng(9).standard_normal(shape)}
    return (
        reference.exact(cotangents).kinds,
        reference.run(dtype, cotangents).kinds,
        reference.spread(dtype, cotangents),
    )


class Narrow(nn.Module):
    """A norm that casts to float32 inside, as many models do, and a fused attention."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(15, 15)

    def forward(self, x):
        y = x.to(torch.float32)
        y = (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
        q = self.project(y).unflatten(-1, (3, 5)).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)


class Wide(Narrow):
    """The same without the casts, attention from its parts: what the oracle should see."""

    def forward(self, x):
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        q = self.project(y).unflatten(-1, (3, 5)).transpose(1, 2)
        weights = torch.softmax(q @ q.transpose(-1, -2) / math.sqrt(5), dim=-1)
        return (weights @ q).transpose(1, 2).flatten(2)


@pytest.fixture(scope="module")
def narrow():
    torch.manual_seed(0)
    return Narrow()


@pytest.fixture(scope="module")
def x():
    return np.random.default_rng(1).standard_normal((2, 7, 15)).astype(np.float32)


def test_the_oracle_refuses_narrowing_casts_and_doubling_alone_would_not_do(narrow, x):
    wide = Wide().double()
    wide.load_state_dict({k: v.double() for k, v in narrow.state_dict().items()})
    with torch.no_grad():
        want = wide(torch.from_numpy(x).double()).numpy()
        doubled = copy.deepcopy(narrow).double()(torch.from_numpy(x).double()).numpy()
    exact = Reference(narrow, None, Inputs((x,), {})).exact({}).outputs["output"]
    assert exact.dtype == np.float64
    # A few dozen float64 roundings apart; the casts' error is 2**-24, a million times more.
    assert np.abs(exact - want).max() <= 64 * 2.0**-53 * np.abs(want).max()
    assert np.abs(doubled - want).max() >= 2.0**-26 * np.abs(want).max()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_torchs_own_error_lies_within_its_budget_and_fills_some_of_it(narrow, x, dtype):
    module = Wide() if dtype == "float64" else Narrow()  # the narrow one never is float64
    module.load_state_dict(narrow.state_dict())
    module = module.to(getattr(torch, dtype))
    x = torch.from_numpy(x).to(getattr(torch, dtype)).double().numpy()
    exact, own, budgets = run(module, x, dtype=dtype)
    compared = 0
    for kind, tensors in exact.items():
        for name, want in tensors.items():
            fraction = np.abs(own[kind][name] - want) / budgets[kind][name].element
            assert fraction.max() <= 1, (kind, name)
            # float64's oracle is torch itself, and need not err.
            assert dtype == "float64" or fraction.max() >= 0.02, (kind, name)
            compared += 1
    assert compared == 4


class Peaked(nn.Module):
    """Scores of hundreds, so that of most rows one probability is 1 but for what float32 drops."""

    def __init__(self):
        super().__init__()
        self.keys, self.values = nn.Linear(15, 15), nn.Linear(15, 15)

    def forward(self, x):
        k, v = (y(x).unflatten(-1, (3, 5)).transpose(1, 2) for y in (self.keys, self.values))
        return nn.functional.scaled_dot_product_attention(100 * k, k, v).transpose(1, 2).flatten(2)


def torchs_own_gradient_of_values_over_budget(x) -> float:
    torch.manual_seed(0)
    exact, own, budgets = (tensors["gradient of parameter"] for tensors in run(Peaked(), x))
    error = np.abs(own["values.weight"] - exact["values.weight"])
    return float((error / budgets["values.weight"].element).max())


def test_a_fused_softmax_may_err_by_the_rounding_of_its_log_sum_exp(x, monkeypatch):
    """Torch's own does: backward it makes the scores again, and the probabilities as exp(s - l)."""
    assert torchs_own_gradient_of_values_over_budget(x) <= 1
    monkeypatch.setattr(ProductErrors, "again", lambda *_: None)
    assert torchs_own_gradient_of_values_over_budget(x) <= 1
    monkeypatch.setattr(torch, "logsumexp", lambda s, dim, keepdim: torch.zeros_like(s[..., :1]))
    assert torchs_own_gradient_of_values_over_budget(x) > 1


def test_the_spread_is_that_of_the_precision(narrow, x):
    """The budget grows with the roundoff: bfloat16's is 2**16 of float32's, to within the sums'
    float32 accumulation that both have."""
    floors = {d: run_floor(narrow, x, d) for d in ("float32", "bfloat16")}
    assert 2**14 <= floors["bfloat16"] / floors["float32"] <= 2**16.5


def run_floor(module, x, precision: str) -> float:
    return Reference(module, None, Inputs((x,), {})).spread(precision, {})["output"]["output"].floor


def projection(got, want):
    """The relative error that all elements share."""
    return float(((got - want) * want).sum()) / float(np.square(want).sum())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_that_are_the_same_share_their_error(dtype):
    """All round alike: torch's own shared error is no smaller for 300 of them than for one."""
    torch.manual_seed(0)
    rows = np.broadcast_to(np.random.default_rng(1).standard_normal(15), (2, 300, 15))
    linear = nn.Linear(15, 15).to(getattr(torch, dtype))
    rows = rows.astype(jnp.dtype(dtype))
    exact, own, budgets = (t["output"]["output"] for t in run(linear, rows, dtype=dtype))
    shared = projection(own.astype(np.float64), exact)
    assert 0.02 < abs(shared) / budgets.projection <= 1


def test_a_budget_covers_a_fresh_draw_of_its_own_spread():
    rng = np.random.default_rng(0)
    spread = np.exp(rng.standard_normal((11, 13)))  # unlike from element to element
    center = np.zeros((11, 13))
    runs = [spread * rng.standard_normal((11, 13)) for _ in range(16)]
    budget = Budget.of(center, runs, PRECISIONS["float32"])
    fresh = spread * rng.standard_normal((2000, 11, 13))
    assert (np.abs(fresh) <= budget.element).all()
    assert (np.sqrt((fresh**2).mean(axis=(1, 2))) <= budget.rms).all()


def budget_of_all_runs_at_once(center, runs, precision):
    """The definition, in two passes: first every run, then the mean of their squares."""
    finite = np.isfinite(center)
    deviations = np.array([run[finite] - center[finite] for run in runs])
    own = np.square(deviations).mean(axis=0)
    each = np.sqrt(np.square(deviations).mean(axis=1))
    shared = [projection(run[finite], center[finite]) for run in runs]
    alone = student_quantile(FALSE_ALARM, len(runs))
    element = student_quantile(FALSE_ALARM / own.size, 2 * len(runs))
    return (
        element * np.sqrt((own + own.mean()) / 2) + precision.tiny,
        each.mean() + alone * each.std() + precision.tiny,
        math.sqrt(own.mean()),
        alone * math.sqrt(np.mean(np.square(shared))),
    )


SPREADS = {
    "more than one part": ((3, 11, 1009), 0),
    "one number": ((), 0),
    "NaN in the centre": ((7, 13), 5),
    "a transposed view": ((13, 7), 0),
}


@pytest.mark.parametrize("row", SPREADS)
@pytest.mark.parametrize("name", ["float32", "float64"])
def test_runs_added_one_by_one_give_the_budget_of_all_at_once(row, name):
    shape, undefined = SPREADS[row]
    rng, precision = np.random.default_rng(len(row)), PRECISIONS[name]
    center = rng.standard_normal(shape)
    runs = [center * (1 + precision.store * rng.standard_normal(shape)) for _ in range(RUNS)]
    if undefined:
        center.flat[:undefined] = math.nan
    if row == "a transposed view":
        center, runs = center.T, [run.T for run in runs]
    element, *figures = budget_of_all_runs_at_once(center, runs, precision)
    budget = Budget.of(center, iter(runs), precision)
    # Sums of up to 33,297 terms in another order, a few roundings each side.
    close = {"rtol": 4 * math.sqrt(center.size) * 2.0**-52, "atol": 0}
    np.testing.assert_allclose([budget.rms, budget.floor, budget.projection], figures, **close)
    assert (np.isnan(budget.element) == ~np.isfinite(center)).all()
    kept = budget.element[np.isfinite(center)]
    # float32 is rounded up: at least what it stands for, by less than a roundoff more.
    assert (kept >= element * (1 - close["rtol"])).all()
    most = 2.0**-23 if name == "float32" else close["rtol"]
    assert (kept <= element * (1 + most + close["rtol"])).all()
    assert kept.dtype == (np.float32 if name == "float32" else np.float64)
