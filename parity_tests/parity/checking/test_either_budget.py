"""In a narrow dtype a tensor passes by either budget, and all that is asked of a port follows it.

Both budgets are real, except for a tensor that one of them is made to refuse.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from helpers.parity.findings import kinds
from helpers.parity.functions import PortFunction, TorchFunction
from jax_attn.parity import Verdict, check
from jax_attn.parity.checking.preparing import prepare_module
from jax_attn.parity.golden.golden import Golden, load_golden
from jax_attn.parity.judge.budget import Budget
from jax_attn.parity.judge.compare import POWER, ROUNDINGS, rms
from jax_attn.parity.run.inputs_and_runs import Inputs, float_dtype

RNG = np.random.default_rng(0)
X, POSITIONS = RNG.standard_normal((3, 7)), np.zeros((3, 7), np.int32)
DTYPE = "bfloat16"


def prepared(reference, *inputs, first="", second=""):
    """A reference whose first budget refuses every port's output `first`, and so the second."""
    side = prepare_module(
        reference, Inputs.of(inputs, float_dtype(DTYPE)), None, DTYPE, True, 0, None
    )
    put(refusing, side, first)
    put(refusing, side.again, second)
    return side


def put(change, side, *names):
    """Change the budgets of some outputs and of the gradients of some inputs."""
    for name in names:
        for kind in ("output", "gradient of input"):
            if name in side.budgets[kind]:
                scale = rms(side.exact.kinds[kind][name])
                side.budgets[kind][name] = change(side.budgets[kind][name], scale)


def refusing(budget: Budget, scale: float) -> Budget:
    return replace(budget, element=0 * budget.element, projection=0.0)


def allowing(budget: Budget, scale: float) -> Budget:
    """The widest budget that has power."""
    element = np.full_like(budget.element, 10 * scale)
    return replace(budget, element=element, projection=1.0, rms=0.99 * POWER / ROUNDINGS * scale)


def both(x, n):
    return {"a": x.tanh() * x * 1.3, "b": (x * 0.7).exp() + 0.3 * n.to(x.dtype)}


def port(x, n):
    return {"a": jnp.tanh(x) * x * 1.3, "b": jnp.exp(x * 0.7) + 0.3 * n.astype(x.dtype)}


def without_integers(x, n):
    return port(x, 0 * n)


REFUSED = {
    "neither": ("", ""),
    "another by each": ("a", "b"),
    "the same by the first": ("a", ""),
    "the same by both": ("a", "a"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_tensor_fails_only_by_both(name):
    first, second = REFUSED[name]
    side = prepared(TorchFunction(both), X, POSITIONS, first=first, second=second)
    result = check(side, PortFunction(port), transforms=("jit",))
    failed = {t.name for t in result.tensors if t.verdict is Verdict.FAIL}
    assert failed == ({first} & {second}) - {""}, str(result)
    assert (result.verdict is Verdict.FAIL) is (name == "the same by both")


@pytest.mark.parametrize("name", ["neither", "another by each", "the same by the first"])
def test_a_port_that_passes_is_run_on_other_inputs(name):
    """Integers that are 0 throughout hide that a port ignores them."""
    first, second = REFUSED[name]
    side = prepared(TorchFunction(both), X, POSITIONS, first=first, second=second)
    result = check(side, PortFunction(without_integers), transforms=("jit",))
    assert kinds(result, "failure") == ["input-ignored"], str(result)


OTHERS = {"right": (port, []), "wrong": (without_integers, ["input-ignored"])}


@pytest.mark.parametrize("is_golden", [False, True])
@pytest.mark.parametrize("name", OTHERS)
def test_other_inputs_are_judged_by_either(name, is_golden, tmp_path):
    """The first budget refuses every port on other integers, and the second is real."""
    side = prepared(TorchFunction(both), X, POSITIONS)
    for asked in (side, side.again):
        others = asked.answer("other integers")
        for other in (others.together, *others.each.values()):
            put(refusing, other, "b")
    judge = side
    if is_golden:
        Golden.of(side, {}).save(tmp_path / "golden")
        judge = load_golden(tmp_path / "golden")
    function, failures = OTHERS[name]
    result = check(judge, PortFunction(function), transforms=("jit",))
    assert kinds(result, "failure") == failures, str(result)
    assert (result.verdict is Verdict.FAIL) is bool(failures)


# name -> outputs of a softmax, or gradients, in which the first budget lets bugs pass; the second
LETS_PASS = {
    "neither": ((), ()),
    "the first": (("a", "b", "0"), ()),
    "the second": ((), ("a", "b", "0")),
    "each in another output": (("a", "0"), ("b",)),
}


def attended(x):
    a = x + 0.2 * (0.3 * x @ x.T).softmax(-1) @ x
    return {"a": a, "b": 0.7 * a, "c": 1.3 * x.tanh()}


def port_attended(x):
    a = x + 0.2 * jax.nn.softmax(0.3 * x @ x.T, -1) @ x
    return {"a": a, "b": 0.7 * a, "c": 1.3 * jnp.tanh(x)}


@pytest.mark.parametrize("is_golden", [False, True])
@pytest.mark.parametrize("name", LETS_PASS)
def test_a_bug_that_passes_by_either_is_a_doubt(name, is_golden):
    """The first budget refuses `c`, so the port is judged by either."""
    side = prepared(TorchFunction(attended), X, first="c")
    for each, names in zip((side, side.again), LETS_PASS[name], strict=True):
        put(allowing, each, *names)
    judge = Golden.of(side, {}) if is_golden else side
    result = check(judge, PortFunction(port_attended), transforms=("jit",))
    assert not kinds(result, "failure"), str(result)
    assert ("scale" in kinds(result, "doubt")) is (name != "neither"), str(result)


class Counting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(7, dtype=torch.bfloat16))

    def forward(self, x):
        self.total += 1
        return {"a": x.tanh() * self.total}


def test_a_second_call_that_only_the_second_budget_lets_run_is_judged():
    """The first, which refuses the output, makes no second call."""
    side = prepared(Counting(), X, first="a")
    result = check(side, PortFunction(lambda x: {"a": jnp.tanh(x)}), transforms=("jit",))
    assert result.verdict is Verdict.FAIL
    assert kinds(result, "failure") == ["over-budget", "second-call-differs"], str(result)


def test_a_convention_is_found_by_the_second_budget():
    x = np.where(RNG.random((3, 7)) < 0.3, 0.0, X)
    reference = TorchFunction(lambda x: {"a": x.abs() * 1.3, "b": x.tanh() * 0.7})
    side = prepared(reference, x, first="0")
    usual = PortFunction(lambda x: {"a": jnp.abs(x) * 1.3, "b": jnp.tanh(x) * 0.7})
    result = check(side, usual, transforms=("jit",))
    assert result.verdict is Verdict.FAIL
    assert "kink" in kinds(result, "failure"), str(result)
