"""`parity.check` says what it did not compare or judge, and refuses what it cannot check."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from helpers.block_pair import pair
from jax_attn.parity import Verdict, check
from jax_attn.parity.checking.prepared import Prepared
from jax_attn.parity.judge.budget import bridge
from jax_attn.parity.judge.compare import rms
from jax_attn.parity.run.inputs_and_runs import Inputs
from jax_attn.parity.run.perturbed_mode import Perturbed
from jax_attn.parity.run.reference import Reference
from jax_attn.transfer import LAYER_NORM, LINEAR, Layout


def test_without_a_layout_the_result_says_what_was_not_compared(x):
    result = check(*pair(), (x,), transforms=("eager",))
    assert result.verdict is Verdict.PASS
    assert "weights and parameter gradients were not compared" in result.notes[0]
    assert {t.label for t in result.tensors} == {"output", "grad input 0"}


def test_inputs_without_power_are_inconclusive(x):
    """Two numbers that cancel: the output is rounding and nothing else."""

    class Cancels(torch.nn.Module):
        def forward(self, x):
            return (x + 1e7) - 1e7

    class Port(nnx.Module):
        def __call__(self, x):
            return (x + 1e7) - 1e7

    result = check(Cancels(), Port(), (x,), gradients=False, transforms=("eager",))
    assert result.verdict is Verdict.INCONCLUSIVE
    assert "no power" in "\n".join(result.reasons)


def test_a_check_of_zeros_alone_is_inconclusive():
    reference, port = (
        torch.nn.Linear(5, 3, bias=False),
        nnx.Linear(5, 3, use_bias=False, rngs=nnx.Rngs(0)),
    )
    options = {"gradients": False, "transforms": ("eager",)}
    result = check(reference, port, (np.zeros((2, 5)),), **options)  # with other weights
    assert result.verdict is Verdict.INCONCLUSIVE
    assert "every compared tensor is zero" in "\n".join(result.doubts)
    result = check(reference, port, (np.zeros((2, 5)),), transforms=("eager",))
    assert result.verdict is Verdict.FAIL


def test_a_table_that_does_not_fit_fails_with_its_problems(x):
    short = Layout(LAYER_NORM.under("norm", "norm"), LINEAR.under("head", "head"))
    result = check(*pair(), (x,), layout=short, transforms=("eager",))
    assert result.verdict is Verdict.FAIL
    assert "attention.q_proj.kernel" in "\n".join(result.failures)
    assert "the table does not pair them" in result.notes[0]


class Shifted(torch.nn.Module):
    """A softmax of scores that a number is added to: the same, and that number's gradient is 0."""

    def __init__(self):
        super().__init__()
        self.shift = torch.nn.Parameter(torch.zeros(1))

    def forward(self, scores):
        return torch.softmax(scores + self.shift, dim=-1)


def test_a_zero_that_is_a_sum_of_thousands_is_a_zero_in_bfloat16_too(monkeypatch):
    """Of them bfloat16's roundings cancel, float64's of a sum do not: they are asked for.

    Here of a sum kept in float32, as devices other than the CPU keep it.
    """
    monkeypatch.setattr(Perturbed, "_bridge", lambda self, name, n, *_: bridge(n, self.precision))
    scores = np.random.default_rng(3).standard_normal((3, 4099)).astype(jnp.bfloat16)
    reference = Reference(Shifted().to(torch.bfloat16), None, Inputs((scores,), {}))
    prepared = Prepared(reference, "bfloat16")
    kind = "gradient of parameter"
    rounding = rms(prepared.exact.kinds[kind]["shift"])
    alone = reference.spread("bfloat16", prepared.cotangents)[kind]["shift"].zero
    assert alone < rounding <= prepared.budgets[kind]["shift"].zero


BAD = {
    "a number that the dtype does not hold": (
        lambda r, p, x: check(*pair("float16"), (1e6 * x,), dtype="float16"),
        TypeError,
        r"inputs\[0\]: expected numbers that float16 holds",
    ),
    "a reference that is no module": (
        lambda r, p, x: check(p, p, (x,)),
        TypeError,
        "reference: expected a Module, got FlaxBlock",
    ),
    "a port that is no module": (
        lambda r, p, x: check(r, r, (x,)),
        TypeError,
        "port: expected a Module",
    ),
    "a layout that is none": (
        lambda r, p, x: check(r, p, (x,), layout={}),
        TypeError,
        "layout: expected a Layout, got dict",
    ),
    "inputs that are a list": (lambda r, p, x: check(r, p, [x]), TypeError, "inputs: expected"),
    "an input that is a tensor": (
        lambda r, p, x: check(r, p, (torch.from_numpy(x),)),
        TypeError,
        r"inputs\[0\]: expected a NumPy array",
    ),
    "an unknown dtype": (
        lambda r, p, x: check(r, p, (x,), dtype="float8"),
        ValueError,
        "dtype: expected one of float32",
    ),
    "a dtype that is no name": (
        lambda r, p, x: check(r, p, (x,), dtype=np.dtype("float32")),
        ValueError,
        r"dtype: expected one of float32.* got dtype\('float32'\)",
    ),
    "an unknown transform, and no x64": (
        lambda r, p, x: check(r, p, (x,), dtype="float64", transforms=("xla",)),
        ValueError,
        r"(?s)transforms: expected .*xla.*float64 needs JAX's x64 mode",
    ),
    "transforms as a word": (
        lambda r, p, x: check(r, p, (x,), transforms="jit"),
        ValueError,
        "transforms: expected a tuple",
    ),
    "a reference in another dtype": (
        lambda r, p, x: check(r, p, (x,), dtype="bfloat16"),
        ValueError,
        "reference parameter 'norm.weight': expected bfloat16, got torch.float32",
    ),
    "a reference in training mode, with dropout": (
        lambda r, p, x: check(pair(dropout=0.5)[0].train(), p, (x,)),
        ValueError,
        r"reference: expected the same outputs each time.*\.eval\(\)",
    ),
    "a port in another dtype": (
        lambda r, p, x: check(r, pair("bfloat16")[1], (x,), transforms=("eager",)),
        TypeError,
        "port: expected outputs of dtype float32, got",
    ),
    "outputs without names": (
        lambda r, p, x: check(r, p, (x,), reference_call=lambda m, x: (m(x), m(x))),
        TypeError,
        "reference_call=lambda",
    ),
    "outputs named otherwise": (
        lambda r, p, x: check(r, p, (x,), port_call=lambda m, x: {"y": m(x)}),
        ValueError,
        r"output: the reference has \['output'\], the port \['y'\]",
    ),
}


@pytest.mark.parametrize("row", BAD)
def test_what_cannot_be_checked_is_refused_by_name(row, x):
    call, error, message = BAD[row]
    with pytest.raises(error, match=message):
        call(*pair(), x)
