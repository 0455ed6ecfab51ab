"""Verdicts where a mask is a finite constant, and hides every key of one row."""

import jax.numpy as jnp
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from helpers.parity.masked_pair import FORMS, LAYOUT, Torch, inputs, pair
from jax_attn.parity import Verdict, check
from jax_attn.parity.checking.canaries import try_canaries
from jax_attn.parity.checking.prepared import Prepared
from jax_attn.parity.run.inputs_and_runs import Inputs
from jax_attn.parity.run.port import Port
from jax_attn.parity.run.reference import Reference

ROWS = [
    *((form, -1e9, "float32") for form in FORMS),
    ("filled", None, "float32"),
    ("two added", None, "float32"),
    ("filled", -1e4, "float32"),
    ("added", -1e9, "bfloat16"),
    ("two added", None, "bfloat16"),
    ("filled", -1e4, "bfloat16"),
    ("added", None, "float16"),
]
LONG = [
    *((form, None, "float32") for form in FORMS if (form, None, "float32") not in ROWS),
    ("added", -1e4, "float32"),
    ("added", None, "bfloat16"),
    ("filled", -1e4, "float16"),
]


def pytest_generate_tests(metafunc):
    """Every form, every fill and every dtype; with --long more of them together."""
    if "form" in metafunc.fixturenames:
        rows = [*ROWS, *LONG] if metafunc.config.getoption("--long") else ROWS
        metafunc.parametrize(("form", "fill", "dtype"), rows)


def prepared(form, fill, dtype):
    given = Inputs.of(inputs(), jnp.dtype(dtype))
    reference, _ = pair(form, fill, dtype)
    return Prepared(Reference(reference, None, given), dtype)


def worst(side, form, fill, dtype, **options):
    """The verdicts on outputs and input gradients of a port."""
    _, port = pair(form, fill, dtype, **options)
    run = Port(port, None, side.reference.inputs).run(dtype, side.cotangents, "eager")
    return [
        side.judge_one(kind, name, "eager", got)
        for kind, tensors in run.kinds.items()
        for name, got in tensors.items()
        if kind != "gradient of parameter"
    ]


@pytest.mark.slow
def test_a_row_hidden_by_a_constant_has_the_mean_of_the_values_and_not_zeros(form, fill, dtype):
    side = prepared(form, fill, dtype)
    right, wrong = (worst(side, form, fill, dtype, zeros=zeros) for zeros in (False, True))
    assert [r.verdict for r in right] == [Verdict.PASS] * 2, [r.reasons for r in right]
    assert [r.verdict for r in wrong] == [Verdict.FAIL] * 2
    assert side.has_power


@pytest.mark.slow
def test_scores_that_bfloat16_may_keep_or_lose_beside_a_fill_have_no_power(monkeypatch):
    """bfloat16 keeps no score beside -1e4; a kernel that adds in float32 does."""
    row = "a product added", -1e4, "bfloat16"
    side = prepared(*row)
    for report in worst(side, *row):
        assert report.verdict is Verdict.INCONCLUSIVE
        assert report.reasons[0].kind == "no-power"
    # Where no canary is seen, what hides them is the rounding, which is said once.
    monkeypatch.setattr(Prepared, "would_fail", lambda *_: False)
    found = try_canaries(side)
    assert found.doubts == ()
    assert found.notes[-1].kind == "drowned"


class Fused(Torch):
    """By torch's fused attention, which takes heads for its second axis."""

    def forward(self, x, hidden):
        q, k, v = (project(x)[:, None] for project in (self.q, self.k, self.v))
        fill = torch.tensor(self.fill).to(x.dtype)
        mask = torch.where(hidden, fill, 0.0).to(x.dtype)[:, None]
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0)[:, 0]


@pytest.mark.slow
def test_torchs_fused_gradient_errs_in_a_row_hidden_by_a_constant():
    """It loses log(S) beside -1e9 in the log-sum-exp that it keeps for its backward pass."""
    plain, port = pair("added", -1e9)
    fused = Fused("added", -1e9)
    fused.load_state_dict(plain.state_dict())
    result = check(fused, port, inputs(), layout=LAYOUT, transforms=("eager",))
    reasons = {t.label: t.reasons for t in result.tensors if t.verdict is not Verdict.PASS}
    assert {"grad input 0", "grad v.weight"} <= reasons.keys()
    assert "output" not in reasons
    for of_tensor in reasons.values():
        assert [reason.kind for reason in of_tensor] == ["reference-errs"]
