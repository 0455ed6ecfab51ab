"""Masks' fills beside scores, and kernels whose insides hold more than their dtype."""

import math

import numpy as np
import pytest
import torch

from jax_attn.parity.checking.prepared import Prepared
from jax_attn.parity.judge.figures import figures
from jax_attn.parity.run.inputs_and_runs import Inputs, wide
from jax_attn.parity.run.modes.fills import Summands, as_kept
from jax_attn.parity.run.reference import Reference

_LOWEST = torch.finfo(torch.float64).min  # stands for the lowest number of the dtype under test

SUMS = {
    "float16: half a step below the score": (torch.float16, 15.0, _LOWEST),
    "float16: a step of 32": (torch.float16, 17.0, -65472.0),
    "float16: two steps": (torch.float16, 49.0, -65440.0),
    "float16: beyond its range": (torch.float16, -17.0, -math.inf),
    "float16: hidden twice": (torch.float16, -math.inf, -math.inf),
    "bfloat16: lost": (torch.bfloat16, 49.0, _LOWEST),
    "float32: lost": (torch.float32, 49.0, _LOWEST),
}


@pytest.mark.parametrize(("dtype", "score", "expected"), SUMS.values(), ids=SUMS)
def test_a_sum_with_the_lowest_number_is_what_the_dtype_stores(dtype, score, expected):
    """But for the lowest number itself, which float64's own stands for."""
    scores, fill = (
        torch.tensor([score], dtype=torch.float64),
        torch.tensor([_LOWEST], dtype=torch.float64),
    )
    summands = Summands.of("add", (scores, fill), {})
    assert as_kept(scores + fill, summands, dtype).item() == expected
    in_dtype = (scores.to(dtype) + torch.finfo(dtype).min).item()
    assert in_dtype == (torch.finfo(dtype).min if expected == _LOWEST else expected)


def _own_errors(module: torch.nn.Module, inputs: dict[str, np.ndarray], dtype: str) -> list[float]:
    """The largest fraction of its budget that torch's own error has, of each tensor."""
    prepared = Prepared(Reference(module, None, Inputs.of(inputs, dtype)), dtype, seed=3)
    fractions = []
    for kind, tensors in prepared.exact.kinds.items():
        for name, want in tensors.items():
            own, budget = wide(prepared.own.kinds[kind])[name], prepared.budgets[kind][name]
            assert math.isfinite(budget.rms)
            fractions.append(figures(want, own, None, budget.element).port.fraction)
    return fractions


class _Attention(torch.nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        live = torch.arange(13) == (5 * torch.arange(13)[:, None]) % 13
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=live)


def test_scores_that_a_fused_kernel_makes_again_backward_are_allowed_for():
    """With a single live key its weight is 1, but exp(score - the first score) backward."""
    rng = np.random.default_rng(0)
    inputs = {
        name: scale * rng.standard_normal((1, 4, 13, 15)).astype(np.float32)
        for name, scale in {"q": 20.0, "k": 20.0, "v": 1.0}.items()
    }
    assert max(_own_errors(_Attention(), inputs, "float32")) < 1


def test_what_overflows_float16_is_finite_inside_a_kernel():
    """The backward pass of a norm multiplies by the number of features: 60 * 2000 > 65504."""
    norm = torch.nn.LayerNorm(60).half()
    torch.nn.init.constant_(norm.weight, 2000.0)
    x = np.random.default_rng(0).standard_normal((5, 60)).astype(np.float16)
    assert max(_own_errors(norm, {"input": x}, "float16")) < 1
