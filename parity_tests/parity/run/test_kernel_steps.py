"""The steps inside kernels that are written here are those of torch's decompositions."""

import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from torch import nn

from jax_attn.parity.run.inputs_and_runs import Inputs
from jax_attn.parity.run.modes import perturbed_mode
from jax_attn.parity.run.reference import Reference

CALLS = {
    "layer norm": nn.LayerNorm(7),
    "layer norm without parameters": nn.LayerNorm(7, elementwise_affine=False),
    "layer norm without bias": nn.LayerNorm(7, bias=False),
    "layer norm of two axes": nn.LayerNorm((5, 7)),
    "layer norm of every axis": nn.LayerNorm((3, 5, 7)),
    "softmax": nn.Softmax(1),
    "log softmax": nn.LogSoftmax(-1),
    "variance": lambda x: torch.var_mean(x, dim=(0, -1), keepdim=True)[0],
    "variance by n - 2": lambda x: torch.var_mean(x, dim=1, correction=2)[0],
    "variance of all": lambda x: torch.var_mean(x)[0],
}


@pytest.mark.parametrize("many", [True, False], ids=["one pass", "run by run"])
@pytest.mark.parametrize("name", CALLS)
def test_the_steps_and_their_draws_are_torchs_bit_for_bit(name, many, monkeypatch):
    own = _budgets(CALLS[name], many, monkeypatch)
    monkeypatch.setattr(perturbed_mode, "STEPS", {})
    assert own == _budgets(CALLS[name], many, monkeypatch)


def test_one_step_in_another_order_has_other_draws(monkeypatch):
    own = _budgets(CALLS["softmax"], True, monkeypatch)
    steps = {"_softmax_backward_data": lambda d, y, dim, _: y * d - y * (y * d).sum(dim, True)}
    monkeypatch.setattr(perturbed_mode, "STEPS", steps)
    assert own != _budgets(CALLS["softmax"], True, monkeypatch)


def _budgets(call, many, monkeypatch):
    """Return the bits of every budget of a call."""
    x = np.random.default_rng(0).standard_normal((3, 5, 7)).astype(np.float32)
    module = call if isinstance(call, nn.Module) else nn.Identity()
    if not isinstance(call, nn.Module):
        module.forward = call
    reference = Reference(module, None, Inputs((x,), {}))
    monkeypatch.setattr(Reference, "_is_small", many)
    shape = reference.outputs("float32")["output"].shape
    spread = reference.spread("float32", {"output": np.ones(shape, np.float32)}, 4)
    return [budget.element.tobytes() for named in spread.values() for budget in named.values()]


@pytest.mark.slow
def test_a_reference_is_prepared_without_torchs_compiler_sympy_and_scipy():
    lines = """
        import sys, numpy, torch
        from jax_attn import parity
        layers = torch.nn.LayerNorm(5), torch.nn.GELU(), torch.nn.Linear(5, 7), torch.nn.Softmax(-1)
        x = numpy.ones((3, 5), numpy.float32)
        parity.prepare(torch.nn.Sequential(*layers), (x,))
        print(sorted({"sympy", "torch._dynamo", "torch.distributed.tensor", "scipy.special"}
            & sys.modules.keys()))
    """
    run = (sys.executable, "-c", textwrap.dedent(lines))
    assert subprocess.run(run, capture_output=True, text=True, check=True).stdout == "[]\n"
