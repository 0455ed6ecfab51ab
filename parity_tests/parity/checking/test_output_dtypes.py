"""Outputs in a finer dtype than the modules, and ports that compute in a coarser one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from helpers.parity.findings import kinds, sentences
from helpers.parity.functions import PortFunction, TorchFunction
from jax_attn import parity
from jax_attn.parity import Verdict, check
from jax_attn.transfer import LINEAR, Layout, load

D_IN, D, D_OUT, ROWS = 12, 23, 7, 5
TABLE = Layout(LINEAR.under("up", "up"), LINEAR.under("head", "head"))
X = np.random.default_rng(0).standard_normal((ROWS, D_IN))


class Reference(torch.nn.Module):
    def __init__(self, dtype, outputs):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.head = torch.nn.Linear(D_IN, D), torch.nn.Linear(D, D_OUT)
        self.outputs = getattr(torch, outputs)
        self.to(getattr(torch, dtype))

    def forward(self, x):
        y = torch.tanh(self.up(x))
        return {"logits": self.head(y).to(self.outputs), "hidden": y}


class Port(nnx.Module):
    def __init__(self, reference, dtype, outputs, *, computes=None, scale=1.0):
        made = {"rngs": nnx.Rngs(0), "param_dtype": jnp.dtype(dtype)}
        made["dtype"] = jnp.dtype(computes or dtype)
        self.up, self.head = nnx.Linear(D_IN, D, **made), nnx.Linear(D, D_OUT, **made)
        self.outputs, self.scale = jnp.dtype(outputs), scale
        load(self, reference.state_dict(), TABLE)

    def __call__(self, x):
        y = jnp.tanh(self.up(x))
        return {"logits": self.scale * self.head(y).astype(self.outputs), "hidden": y}


# name -> dtype of both modules, of the reference's logits, of the port's
PAIRS = {
    "float32 of both in bfloat16": ("bfloat16", "float32", "float32"),
    "float32 of the reference in bfloat16": ("bfloat16", "float32", "bfloat16"),
    "float32 of the port in bfloat16": ("bfloat16", "bfloat16", "float32"),
    "float32 of both in float16": ("float16", "float32", "float32"),
    "float64 of the reference in float32": ("float32", "float64", "float32"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PAIRS)
def test_finer_outputs_are_judged_and_noted_if_only_one_side_has_them(name):
    dtype, ours, theirs = PAIRS[name]
    reference = Reference(dtype, ours)
    options = {"layout": TABLE, "dtype": dtype, "transforms": ("jit", "grad")}
    right, wrong = (Port(reference, dtype, theirs, scale=scale) for scale in (1.0, 1.5))
    result = check(reference, right, (X,), **options)
    assert result.verdict is Verdict.PASS, str(result)
    assert kinds(result).count("output-dtype") == (ours != theirs)
    assert {t.kind for t in result.tensors} >= {"gradient of input", "gradient of parameter"}
    assert check(reference, wrong, (X,), **options).verdict is Verdict.FAIL


def test_a_golden_reference_judges_them_alike():
    reference = Reference("bfloat16", "float32")
    port, options = Port(reference, "bfloat16", "bfloat16"), {"transforms": ("jit",)}
    golden = parity.prepare(reference, (X,), dtype="bfloat16")
    want = check(reference, port, (X,), layout=TABLE, dtype="bfloat16", **options)
    got = check(golden, port, layout=TABLE, **options)
    assert got.tensors == want.tensors
    assert sentences(got, "output-dtype") == sentences(want, "output-dtype")


def test_finer_outputs_are_judged_under_strict_promotion():
    reference = Reference("bfloat16", "float32")
    port = Port(reference, "bfloat16", "float32")
    with jax.numpy_dtype_promotion("strict"):
        result = check(reference, port, (X,), dtype="bfloat16", transforms=("grad",))
    assert result.verdict is Verdict.PASS, str(result)


REMEDY = 'to check a port that computes in bfloat16, pass dtype="bfloat16"'
COARSE = {
    "outputs, too": "bfloat16",
    "outputs widened": "float32",
}


@pytest.mark.parametrize("name", COARSE)
def test_a_port_that_computes_coarser_is_told_the_dtype_to_check(name):
    reference = Reference("float32", "float32")
    port = Port(reference, "float32", COARSE[name], computes="bfloat16")
    call = {"port_call": lambda module, x: module(x)["logits"]}
    call |= {"reference_call": lambda module, x: module(x)["logits"]}
    if COARSE[name] == "bfloat16":
        with pytest.raises(TypeError, match=f"got {{'output': 'bfloat16'}}.*; {REMEDY}"):
            check(reference, port, (X,), transforms=("jit",), **call)
        return
    result = check(reference, port, (X,), layout=TABLE, transforms=("jit",), **call)
    assert result.verdict is Verdict.FAIL
    (said,) = sentences(result, "coarse-port")
    assert REMEDY in said
    narrow = Reference("bfloat16", "float32")
    narrow.load_state_dict(reference.state_dict())
    followed = Port(narrow, "bfloat16", "float32")
    options = {"layout": TABLE, "dtype": "bfloat16", "transforms": ("jit",)}
    assert check(narrow, followed, (X,), **options).verdict is Verdict.PASS


# name -> a port of x, wrong by its rounding to bfloat16; whether that is a failure or a note
SHARES = {
    "one of three operations": (lambda x: 1.5 * x.astype(jnp.bfloat16).astype(x.dtype), "note"),
    "one of two": (lambda x: x.astype(jnp.bfloat16).astype(x.dtype), "failure"),
    "two of three": (lambda x: (1.5 * x.astype(jnp.bfloat16)).astype(x.dtype), "failure"),
}


@pytest.mark.parametrize("name", SHARES)
def test_few_coarse_operations_do_not_explain_a_failure(name):
    port, weight = SHARES[name]
    result = check(TorchFunction(lambda x: 1.0 * x), PortFunction(port), (X,), transforms=("jit",))
    assert result.verdict is Verdict.FAIL
    assert [f.weight for f in result.findings if f.kind == "coarse-port"] == [weight], str(result)


@pytest.mark.slow
def test_a_port_that_fails_in_its_own_dtype_is_told_nothing_of_dtypes():
    reference = Reference("float32", "float32")
    result = check(reference, Port(reference, "float32", "float32", scale=1.5), (X,), layout=TABLE)
    assert result.verdict is Verdict.FAIL
    assert "coarse-port" not in kinds(result)


def test_complex_outputs_of_a_port_are_refused():
    reference = Reference("float32", "float32")
    port = Port(reference, "float32", "complex64")
    with pytest.raises(TypeError, match=r"expected outputs of dtype float32.*complex64"):
        check(reference, port, (X,), transforms=("jit",))
