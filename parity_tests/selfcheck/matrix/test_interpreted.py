"""Rows of the matrix by splash, interpreted: what they are called, and what is refused."""

import pytest

from jax_attn.attention.kernels import splash_kernel
from jax_attn.parity.judge.compare import Verdict
from jax_attn.report.documents import as_markdown, summary, summary_lines
from jax_attn.selfcheck.matrix.cases import Case
from jax_attn.selfcheck.matrix.rows import emulated
from jax_attn.selfcheck.matrix.run_rows import run_cases, run_emulated
from jax_attn.selfcheck.power.trials import doubts

PADDED = Case("gqa", "float32", "padding", "cross", "jit")


@pytest.mark.slow
def test_a_row_that_it_serves_is_judged_and_says_interpreted():
    (result,) = run_cases([PADDED], implementation="splash", doubts=doubts)
    assert result.verdict is Verdict.PASS, str(result)
    assert (result.level, result.details["implementation"]) == ("interpreted", "splash")
    assert summary([result])["float32_error_over_torch"] == {}
    assert "1 interpreted on cpu" in summary_lines([result])[0]


@pytest.mark.slow
def test_a_mistake_in_it_fails_the_row(monkeypatch):
    monkeypatch.setattr(splash_kernel, "_segments", lambda *_: None)
    (result,) = run_cases([PADDED], implementation="splash", doubts=doubts)
    assert result.verdict is Verdict.FAIL


# The kernel insisted on, the row's dtype and mask, a reason.
REFUSED = {
    "an array": ("splash", "float32", "per_head", "it takes no boolean array"),
    "a bias": ("splash", "float32", "bias", "it adds no bias"),
    "float64": ("splash", "float64", "none", "it takes bfloat16 and float32, not float64"),
    "elsewhere": ("cudnn", "bfloat16", "none", "it runs on cuda, not on cpu"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_row_that_is_refused_has_reasons_and_no_verdict(name):
    implementation, dtype, mask, why = REFUSED[name]
    case = Case("gqa", dtype, mask, "cross", "jit")
    (told,) = run_cases([case], implementation=implementation, doubts=doubts)
    assert (told.design, told.level) == (case.name, "refused")
    assert why in told.error
    first, second = summary_lines([], [told])[:2]
    assert first.startswith("0 pass")
    listed = "not run, listed in the report: 1 refused by the kernel, for the reasons given"
    assert second == listed
    assert why in as_markdown([], {}, [told])


def test_what_a_vendors_kernel_multiplies_is_not_emulated():
    case = next(c for c in emulated() if c.dtype == "float32")
    told = run_emulated(case, implementation="splash", doubts=doubts)
    assert (told.design, told.level, told.target) == (case.name, "refused", "tpu")
    assert "splash multiplies in a kernel of its own" in told.error
