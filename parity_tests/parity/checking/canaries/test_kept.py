"""A port that gives its first outputs again, whatever it is called on, fails."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from helpers.parity.findings import sentences
from jax_attn.parity import Verdict, check

X = np.random.default_rng(0).standard_normal((2, 3, 5))


class Calls(nnx.Module):
    """A port without weights: its call is what is checked."""


def of_inputs(kept):
    return lambda x: jnp.tanh(x)


def first_ever(kept):
    def call(x):
        y = jnp.tanh(x)
        return y if isinstance(x, jax.core.Tracer) else kept.setdefault("y", y)

    return call


# the port, the inputs, the transforms -> whether it fails
PORTS = {
    "of its inputs": (of_inputs, X, ("eager", "jit"), False),
    "its first outputs": (first_ever, X, ("eager", "jit"), True),
    "its first outputs, compiled alone": (first_ever, X, ("jit",), False),
    "inputs that are the same turned about": (first_ever, np.ones((2, 3)), ("eager",), False),
}


@pytest.mark.parametrize("row", PORTS)
def test_outputs_that_are_kept_fail(row):
    make, x, transforms, fails = PORTS[row]
    port = make({})
    result = check(
        torch.nn.Module(),
        Calls(),
        (x,),
        reference_call=lambda module, x: torch.tanh(x),
        port_call=lambda module, x: port(x),
        transforms=transforms,
    )
    assert (result.verdict is Verdict.FAIL) == fails, str(result)
    told = sentences(result, "outputs-kept")
    said = "on other inputs of the same shapes the port gives `output` as on these"
    assert [said in sentence for sentence in told] == [True] * fails
