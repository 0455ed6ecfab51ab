"""The comparer: one row a way for a tensor to be right, wrong, or beyond judging."""

import numpy as np
import pytest

from jax_attn.parity.judge.budget import PRECISIONS, Budget
from jax_attn.parity.judge.compare import TensorReport, Verdict, judge
from jax_attn.parity.judge.result import ParityError, Result

SHAPE = (3, 5, 7)
U = 1e-3  # the spread of the precision in these rows
rng = np.random.default_rng(0)
WANT = rng.standard_normal(SHAPE)
NOISE = U * rng.standard_normal(SHAPE)


def budget(want=WANT, spread=U) -> Budget:
    draw = np.random.default_rng(1)
    runs = [want + spread * draw.standard_normal(want.shape) for _ in range(16)]
    return Budget.of(want, runs, PRECISIONS["bfloat16"])


def compared(got, want=WANT, own=WANT + NOISE[::-1], spread=U, allowed=None) -> TensorReport:
    with np.errstate(invalid="ignore"):
        finite = np.nan_to_num(want, nan=0.0, posinf=0.0)
    limit = allowed or budget(finite, spread)
    return judge(want, got, own, limit, kind="output", name="y", transform="jit")


def one_off(by: float) -> np.ndarray:
    got = WANT + NOISE
    got[1, 2, 3] = WANT[1, 2, 3] + by
    return got


def with_nan(a: np.ndarray) -> np.ndarray:
    a = a.copy()
    a[0, 1] = np.nan
    return a


ROWS = {
    "within rounding": (lambda: compared(WANT + NOISE), Verdict.PASS, ""),
    "the oracle itself": (lambda: compared(WANT), Verdict.PASS, ""),
    "one element off": (lambda: compared(one_off(50 * U)), Verdict.FAIL, "over budget: element"),
    "every element 3 roundings off": (lambda: compared(WANT + 3.5 * NOISE), Verdict.FAIL, "RMS 1."),
    "all 0.2% too large": (
        lambda: compared(1.002 * WANT),
        Verdict.FAIL,
        "over budget: projection",
    ),
    "NaN where the oracle is finite": (
        lambda: compared(with_nan(WANT)),
        Verdict.FAIL,
        "the port is not finite where the oracle is",
    ),
    "finite where the oracle is NaN": (
        lambda: compared(WANT, want=with_nan(WANT), own=with_nan(WANT)),
        Verdict.FAIL,
        "or the reverse",
    ),
    "NaN where the oracle is NaN": (
        lambda: compared(with_nan(WANT), want=with_nan(WANT), own=with_nan(WANT)),
        Verdict.PASS,
        "",
    ),
    "infinity of the other sign": (
        lambda: compared(np.full((2,), -np.inf), np.full((2,), np.inf), np.full((2,), np.inf)),
        Verdict.FAIL,
        "not finite",
    ),
    "nowhere finite": (
        lambda: compared(np.full((2,), np.nan), np.full((2,), np.nan), np.full((2,), np.nan)),
        Verdict.INCONCLUSIVE,
        "nothing compared",
    ),
    "another shape": (lambda: compared(WANT[:2]), Verdict.FAIL, "shape: expected (3, 5, 7)"),
    "the reference is wrong": (
        lambda: compared(WANT, own=WANT + 1),
        Verdict.FAIL,
        "the reference itself",
    ),
    "both wrong alike": (
        lambda: compared(WANT + 1, own=WANT + 1),
        Verdict.FAIL,
        "over budget: element",
    ),
    "a budget of a fifth of the scale": (
        lambda: compared(WANT, spread=0.1),
        Verdict.INCONCLUSIVE,
        "no power",
    ),
    "zero in theory, rounding in practice": (
        lambda: compared(NOISE, np.zeros(SHAPE), NOISE[::-1]),
        Verdict.PASS,
        "",
    ),
    "zero in theory, and not zero": (
        lambda: compared(np.ones(SHAPE), np.zeros(SHAPE), NOISE),
        Verdict.FAIL,
        "over budget: element",
    ),
    "a scalar": (
        lambda: compared(np.array(1.0), np.array(1.0), np.array(1.0)),
        Verdict.PASS,
        "",
    ),
}


@pytest.mark.parametrize("row", ROWS)
def test_verdict(row):
    make, verdict, reason = ROWS[row]
    report = make()
    assert report.verdict is verdict, report.reasons
    assert reason in "; ".join(report.reasons)
    assert bool(report.reasons) == (verdict is not Verdict.PASS)


def test_the_worst_element_is_named():
    report = compared(one_off(50 * U))
    assert report.index == (1, 2, 3)
    assert report.want == WANT[1, 2, 3]
    assert report.got == WANT[1, 2, 3] + 50 * U


def test_our_error_over_torchs_own_is_reported():
    report = compared(WANT + 2 * NOISE, own=WANT + NOISE)
    # Errors of the size of U come of differences of numbers of WANT's size, rounded 4 times.
    assert abs(report.ratio - 2) <= 4 * np.abs(WANT).max() * 2.0**-53 / U


def result(*tensors: TensorReport, **fields) -> Result:
    return Result(dtype="float32", backend="cpu", tensors=tensors, **fields)


VERDICTS = {
    "all pass": (lambda: result(compared(WANT)), Verdict.PASS),
    "nothing compared": (lambda: result(), Verdict.INCONCLUSIVE),
    "one fails": (lambda: result(compared(WANT), compared(WANT + 1)), Verdict.FAIL),
    "one is inconclusive": (
        lambda: result(compared(WANT), compared(WANT, spread=0.1)),
        Verdict.INCONCLUSIVE,
    ),
    "weights differ": (lambda: result(compared(WANT), failures=("weights",)), Verdict.FAIL),
    "a canary lives": (lambda: result(compared(WANT), doubts=("blind",)), Verdict.INCONCLUSIVE),
    "a doubt never hides a failure": (
        lambda: result(compared(WANT + 1), doubts=("blind",)),
        Verdict.FAIL,
    ),
}


@pytest.mark.parametrize("row", VERDICTS)
def test_the_whole_is_as_bad_as_its_worst(row):
    make, verdict = VERDICTS[row]
    assert make().verdict is verdict


def test_raise_for_status_shows_the_report_and_passes_a_pass_through():
    good = result(compared(WANT))
    assert good.raise_for_status() is good
    bad = result(compared(one_off(50 * U)), name="one element off")
    with pytest.raises(ParityError) as raised:
        bad.raise_for_status()
    assert str(bad) in str(raised.value)
    assert "[1, 2, 3]" in str(raised.value)


def test_as_dict_is_plain_and_finite():
    import json

    text = json.dumps(result(compared(WANT[:2]), compared(with_nan(WANT))).as_dict())
    assert "NaN" not in text
    assert "Infinity" not in text
