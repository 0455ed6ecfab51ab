"""What Python decides by a number that it reads out of a tensor of the reference is noted."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from helpers.parity.findings import kinds
from jax_attn.parity import check
from jax_attn.parity.checking.prepared import Prepared
from jax_attn.parity.checking.read_numbers import read_numbers
from jax_attn.parity.run.inputs_and_runs import Inputs
from jax_attn.parity.run.reference import Reference
from jax_attn.transfer import LINEAR, load

X = np.random.default_rng(0).standard_normal((3, 5))
SHOWN = np.ones((3, 5), bool)


def added(shown):
    return (1 - shown.float()) * -1e9


# name -> (what Python reads of x and of a mask, whether that is noted)
READS = {
    "item of an input": (lambda m, x, shown: x.abs().max().item(), True),
    "float of a parameter": (lambda m, x, shown: float(m.weight.detach().sum()), True),
    "if on a comparison": (lambda m, x, shown: 2 if x.max() > 9 else 3, True),
    "if on any of several": (lambda m, x, shown: 2 if (x > 9).any() else 3, True),
    "if on a mask": (lambda m, x, shown: 2 if shown.all() else 3, False),
    "if on what is made of a mask": (lambda m, x, shown: 2 if added(shown).min() < 0 else 3, False),
    "an assignment by a mask": (lambda m, x, shown: x.clone().masked_fill_(x > 0, 1.0), False),
}


@pytest.mark.parametrize("name", READS)
def test_a_number_that_hangs_on_floats_is_noted(name):
    read, is_noted = READS[name]
    inputs = Inputs.of((X, SHOWN), np.dtype("float32"))
    call = lambda m, x, shown: m(x) * read(m, x, shown)  # noqa: E731
    notes = read_numbers(Prepared(Reference(torch.nn.Linear(5, 5), call, inputs), "float32"))
    assert len(notes) == is_noted
    assert all("at test_read_numbers.py:" in note for note in notes)


@pytest.mark.slow
def test_a_port_without_the_decision_fails_or_passes_with_the_note():
    reference, port = torch.nn.Linear(5, 5), nnx.Linear(5, 5, rngs=nnx.Rngs(0))
    load(port, reference.state_dict(), LINEAR)

    def rescaled(module, x):
        y = module(x)
        return y / 7 if y.abs().max() > 7 else y

    def checked(x, call=None):
        calls = {"reference_call": rescaled, "port_call": call}
        return check(reference, port, (x,), layout=LINEAR, transforms=("jit",), **calls)

    without = checked(X)
    assert without.verdict == "PASS"
    assert "reads-numbers" in kinds(without, "standing note")
    assert checked(20 * X).verdict == "FAIL"
    right = checked(20 * X, lambda m, x: m(x) / jnp.where(jnp.abs(m(x)).max() > 7, 7, 1))
    assert right.verdict == "PASS"
