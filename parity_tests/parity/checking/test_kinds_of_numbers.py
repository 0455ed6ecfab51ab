"""References whose numbers are not all real, dense and floating are judged like others."""

import jax
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


NEAR = np.array([[1.0, 1.0 + 2.0**-23], [1.0, 2.0], [3.0, 1.0], [0.0, -1.0]], np.float32)
EDGE = np.array([[2.0**-26, 1.0], [-1.0, 2.0], [0.5, -3.0]], np.float32)


def best(x):
    return {"sum": x.sum(-1), "best": (x * 3.3 * 1.7).argmax(-1)}


def kept(x):
    return {"sum": x.sum(-1), "kept": (x + 1.0 - 1.0) > 0}


# name -> reference, a wrong port, inputs of which one decision lies within rounding of another
NEAR_DECISIONS = {
    "an index": (best, lambda x: {**best(x), "best": 0 * x.argmax(-1)}, NEAR),
    "another index": (best, lambda x: {**best(x), "best": 1 - x.argmax(-1)}, NEAR),
    "a condition": (kept, lambda x: {**kept(x), "kept": x <= 0}, EDGE),
    "no condition": (kept, lambda x: {**kept(x), "kept": x != x}, EDGE),
}


@pytest.mark.parametrize("name", NEAR_DECISIONS)
def test_one_decision_within_rounding_excuses_no_other(name):
    reference, wrong, x = NEAR_DECISIONS[name]
    verdicts = [
        check(TorchFunction(reference), PortFunction(port), (x,), transforms=("jit",)).verdict
        for port in (reference, wrong)
    ]
    assert verdicts[0] is not Verdict.FAIL
    assert verdicts[1] is Verdict.FAIL


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("kind", [np.float32, np.int32])
def test_an_output_of_another_kind_of_number_is_refused(kind, gradients):
    reference = TorchFunction(lambda x: {"sum": x.sum(-1), "kept": x > 0})
    port = PortFunction(lambda x: {"sum": x.sum(-1), "kept": (x > 0).astype(kind)})
    with pytest.raises(TypeError, match="kept"):
        check(reference, port, (X,), gradients=gradients, transforms=("jit",))


def test_large_indices_beside_float16_are_kept():
    reference = TorchFunction(lambda x: {"sum": 2 * x, "id": x.argmax(-1) + 70000})
    port = PortFunction(lambda x: {"sum": 2 * x, "id": x.argmax(-1) + 70000})
    result = check(reference, port, (X,), dtype="float16", transforms=("jit",))
    assert result.verdict is Verdict.PASS, str(result)


def test_gradients_beside_integers_are_explained():
    reference = TorchFunction(lambda x: {"sum": torch.tanh(x), "kept": x > 0})
    port = PortFunction(
        lambda x: {"sum": jnp.tanh(jax.lax.stop_gradient(x)) + 0 * x, "kept": x > 0}
    )
    result = check(reference, port, (X,), transforms=("jit",))
    assert result.verdict is Verdict.FAIL
    assert result.explain().regions


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
