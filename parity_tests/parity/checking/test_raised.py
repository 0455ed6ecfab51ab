"""A port that raises an error under a transform: that is a reason, and the others are judged."""

import jax
import pytest

from helpers.parity.block_pair import pair
from jax_attn.parity import Verdict, check
from jax_attn.parity.run.inputs_and_runs import RaisedError


def _only_traced(module, x):
    return module(x) if isinstance(x, jax.core.Tracer) else 1 // 0


@pytest.mark.slow
@pytest.mark.parametrize("transforms", [("eager", "jit"), ("jit", "eager")])
def test_an_error_under_one_transform_is_a_reason_and_the_others_are_judged(x, transforms):
    result = check(*pair(), (x,), port_call=_only_traced, transforms=transforms)
    assert (result.verdict, [f.kind for f in result.failures]) == (Verdict.FAIL, ["raised"])
    assert "eager: port: expected it to run" in result.failures[0]
    assert {(t.transform, t.verdict) for t in result.tensors} == {("jit", Verdict.PASS)}


def test_an_error_under_every_transform_is_raised(x):
    with pytest.raises(RaisedError, match=r"got ZeroDivisionError: .*; it was run under eager"):
        check(*pair(), (x,), port_call=_only_traced, transforms=("eager",))


def _only_eager(module, x):
    if "Jaxpr" in type(x).__name__:  # while a program is traced, as for the shapes of outputs
        raise TypeError
    return module(x)


@pytest.mark.slow
def test_a_port_that_cannot_be_traced_is_judged_eagerly(x):
    result = check(*pair(), (x,), port_call=_only_eager)
    assert (result.verdict, [f.kind for f in result.failures]) == (Verdict.FAIL, ["raised"])
    assert result.failures[0].startswith("jit: ")
    assert {(t.transform, t.verdict) for t in result.tensors} == {("eager", Verdict.PASS)}
    wrong = lambda module, x: 2 * _only_eager(module, x)  # noqa: E731
    assert check(*pair(), (x,), port_call=wrong, transforms=("eager",)).verdict is Verdict.FAIL
