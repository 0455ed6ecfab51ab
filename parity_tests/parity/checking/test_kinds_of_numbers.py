"""References whose numbers are not all real, dense and floating are judged like others."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from helpers.parity.functions import PortFunction, TorchFunction
from jax_attn.parity import Verdict, check
from jax_attn.transfer import Layout, row

X = np.random.default_rng(0).standard_normal((3, 5)).astype(np.float32)
AT, VALUES = ((0, 1, 1), (2, 0, 2)), (1.0, 2.0, 3.0)
DENSE = np.zeros((2, 3), np.float32)
DENSE[AT] = VALUES


def coo(x):
    return torch.sparse_coo_tensor(torch.tensor(AT), torch.tensor(VALUES).to(x), (2, 3))


def csr(x):
    return torch.from_numpy(DENSE).to(x).to_sparse_csr()


# name -> reference, right port, wrong port
PAIRS = {
    "sparse, by coordinates": (
        lambda x: torch.sparse.mm(coo(x), x),
        lambda x: DENSE @ x,
        lambda x: np.abs(DENSE - 1) @ x,
    ),
    "sparse, scaled": (
        lambda x: torch.sparse.mm(3.3 * coo(x), x),
        lambda x: 3.3 * DENSE @ x,
        lambda x: 3.2 * DENSE @ x,
    ),
    "sparse, by rows": (lambda x: csr(x) @ x, lambda x: DENSE @ x, lambda x: 2 * DENSE @ x),
    "integers beside": (
        lambda x: {"scores": 2 * x, "best": x.argmax(-1)},
        lambda x: {"scores": 2 * x, "best": x.argmax(-1)},
        lambda x: {"scores": 2 * x, "best": x.argmin(-1)},
    ),
    "booleans beside": (
        lambda x: {"scores": 2 * x, "positive": x > 0},
        lambda x: {"scores": 2 * x, "positive": x > 0},
        lambda x: {"scores": 2 * x, "positive": x > 0.5},
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_right_port_passes_and_a_wrong_one_fails(name):
    reference, right, wrong = PAIRS[name]
    verdicts = [
        check(TorchFunction(reference), PortFunction(port), (X,), transforms=("jit",)).verdict
        for port in (right, wrong)
    ]
    assert verdicts == [Verdict.PASS, Verdict.FAIL]


def test_a_decision_within_rounding_of_another_is_allowed():
    """Two scores that differ by rounding: either index is right, in either order."""
    x = np.array([[1.0, 1.0 + 2.0**-23], [1.0, 2.0]], np.float32)

    def scores(x):
        return {"sum": x.sum(-1), "best": (x * 3.3 * 1.7).argmax(-1)}

    def other(x):
        return {"sum": x.sum(-1), "best": jnp.where(jnp.arange(2) == 0, 0, x.argmax(-1))}

    result = check(TorchFunction(scores), PortFunction(other), (x,), transforms=("jit",))
    assert result.verdict is not Verdict.FAIL, str(result)


class Filter(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(3, dtype=torch.complex64))

    def forward(self, x):
        return torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=5)


class FlaxFilter(nnx.Module):
    def __init__(self, reference, *, conjugate):
        self.weight = nnx.Param(jnp.array(reference.weight.detach().numpy()))
        self.conjugate = conjugate

    def __call__(self, x):
        weight = self.weight[...]
        return jnp.fft.irfft(jnp.fft.rfft(x) * (weight.conj() if self.conjugate else weight), n=5)


@pytest.mark.parametrize("conjugate", [False, True])
def test_complex_parameters_have_gradients_in_torchs_convention(conjugate):
    torch.manual_seed(0)
    reference = Filter()
    port = FlaxFilter(reference, conjugate=conjugate)
    result = check(
        reference, port, (X,), layout=Layout(row("weight", "weight")), transforms=("jit",)
    )
    assert (result.verdict is Verdict.PASS) is not conjugate, str(result)
    assert "grad weight" in str(result)
