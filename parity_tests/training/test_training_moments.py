"""check_training compares the moments that torch keeps, wherever optax keeps them."""

import optax
import pytest
import torch
from torch.optim import SGD, Adadelta, Adamax

from helpers.parity.findings import sentences
from helpers.parity.training_checks import linear_check
from jax_attn.parity.judge.compare import Verdict


class Counting(SGD):
    """Keeps one state more than torch's own."""

    def step(self, closure=None):
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            self.state[p]["seen"] = torch.ones_like(p)


def test_a_moment_that_optax_has_no_field_for_is_noted_and_not_missed():
    result = linear_check(
        optimizer=lambda m: Counting(m.parameters(), 0.1), port_optimizer=optax.sgd(0.1)
    )
    assert result.verdict is Verdict.PASS, str(result)
    (note,) = sentences(result, "moment-not-compared")
    assert note.startswith("seen of torch's optimizer is not")


@pytest.mark.slow
def test_adamaxs_largest_gradients_are_compared():
    result = linear_check(
        optimizer=lambda m: Adamax(m.parameters(), 0.02), port_optimizer=optax.adamax(0.02)
    )
    assert result.verdict is Verdict.PASS, str(result)
    assert "exp_inf of kernel" in {t.name for t in result.tensors}


@pytest.mark.slow
@pytest.mark.parametrize(("rho", "expected"), [(0.9, Verdict.PASS), (0.8, Verdict.FAIL)])
def test_both_moments_of_optaxs_own_adadelta_are_compared(rho, expected):
    result = linear_check(
        optimizer=lambda m: Adadelta(m.parameters(), 0.02),
        port_optimizer=optax.adadelta(0.02, rho=rho),
    )
    assert result.verdict is expected, str(result)
    assert {"square_avg of kernel", "acc_delta of kernel"} <= {t.name for t in result.tensors}
