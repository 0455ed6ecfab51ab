"""`parity.explain` of functions of one tensor: what their causes and their values are."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from jax_attn import parity
from jax_attn.parity.explaining.explanation import where

B, T, N, H = 2, 7, 6, 5
WIDTH = N * H
X = np.random.default_rng(0).standard_normal((B, T, WIDTH)).astype(np.float32)
DERANGED = [3, 0, 5, 1, 2, 4]
HIDDEN, SCORES = B * T * (T - 1) // 2, B * T * T


class Theirs(torch.nn.Module):
    def __init__(self, function: Callable, layer: torch.nn.Module | None = None):
        super().__init__()
        self.function, self.layer = function, layer

    def forward(self, x):
        return self.function(x if self.layer is None else self.layer(x))


class Ours(nnx.Module):
    def __init__(self, function: Callable):
        self.function = function

    def __call__(self, x):
        return self.function(x)


def explained(
    theirs: Callable, ours: Callable, layer: torch.nn.Module | None = None
) -> parity.Explanation:
    port = ours if isinstance(ours, nnx.Module) else Ours(ours)
    return parity.explain(Theirs(theirs, layer), port, (X,), gradients=False, transforms=("jit",))


def angles(xp, x, base: float):
    return xp.sin(x * base ** -(xp.arange(WIDTH, dtype=x.dtype) / WIDTH))


def sees_all(x):
    return torch.softmax(x @ x.mT / WIDTH, -1) @ x


def sees_the_past(x):
    scores = jnp.where(jnp.tri(T, dtype=bool), x @ x.mT / WIDTH, -jnp.inf)
    return jax.nn.softmax(scores) @ x


def of_heads(x):
    return (3 * x).unflatten(-1, (N, H)).transpose(1, 2).softmax(-2)


def of_heads_taken(*index):
    return lambda x: jax.nn.softmax((3 * x).reshape(B, T, N, H).swapaxes(1, 2)[index], -2)


# what the port does -> the reference, the port, its cause's name and value
FUNCTIONS = {
    "another rotary base": (
        lambda x: angles(torch, x, 10_000.0),
        lambda x: angles(jnp, x, 9000.0),
        ("rotary (base)", pytest.approx(9000, rel=1e-5)),
    ),
    "heads in another order": (
        of_heads,
        of_heads_taken(slice(None), jnp.array(DERANGED)),
        ("head order (permuted)", ", ".join(map(str, DERANGED))),
    ),
    "queries reversed": (
        of_heads,
        of_heads_taken(slice(None), slice(None), slice(None, None, -1)),
        ("order (permuted)", ", ".join(map(str, reversed(range(T))))),
    ),
    "a mask where the reference has none": (
        sees_all,
        sees_the_past,
        ("mask (where there is none)", None),
    ),
    "no factor": (lambda x: torch.tanh(3 * x), jnp.tanh, ("scale (left out)", None)),
}
SAID = {
    "a mask where the reference has none": f"hides {HIDDEN} of {SCORES} scores",
    "no factor": "no multiplication by 3",
}


@pytest.mark.slow
@pytest.mark.parametrize("row", FUNCTIONS)
def test_the_cause_of_a_wrong_function_and_its_value(row):
    theirs, ours, expected = FUNCTIONS[row]
    (region,) = explained(theirs, ours).regions
    (cause,) = region.causes
    assert cause.confirmed
    assert (cause.name, cause.value) == expected
    assert SAID.get(row, "") in cause.says
    in_another_order = "the reference's numbers, in another order" in where(region.first_wrong)
    assert in_another_order == ("order" in cause.name)


def writes_in_place(x):
    y = x.clone()
    y[..., 0] *= 2
    return torch.tanh(y)


def test_a_script_that_would_not_give_the_reference_s_numbers_is_none():
    """What is written into a part of a tensor is not among the operations that make the tensor."""
    explanation = explained(writes_in_place, jnp.tanh)
    assert (len(explanation.regions), explanation.repro) == (1, "")


class DoubledBias(nnx.Module):
    def __init__(self, layer):
        self.weight, self.bias = (
            nnx.Param(jnp.array(p.detach().numpy())) for p in layer.parameters()
        )

    def __call__(self, x):
        return jnp.tanh(x @ self.weight[...].T + 2 * self.bias[...])


@pytest.mark.slow
def test_a_product_that_is_right_inside_a_linear_layer_is_not_the_wrong_tensor():
    torch.manual_seed(0)
    layer = torch.nn.Linear(WIDTH, 17)
    (region,) = explained(torch.tanh, DoubledBias(layer), layer).regions
    assert region.first_wrong.theirs.op == "aten.addmm: mul"  # of the bias by beta, which is 1
    assert [tap.op for tap in region.equations] == ["mul"]
    assert [cause.name for cause in region.causes] == ["bias (twice)"]


def turned_by_halves(x):
    """As transformers' `rotate_half` has it."""
    first, second = x.chunk(2, -1)
    angles = torch.arange(T, dtype=x.dtype)[:, None] * 0.7 ** torch.arange(WIDTH // 2)
    cos, sin = (torch.cat((f(angles),) * 2, -1) for f in (torch.cos, torch.sin))
    return x * cos + torch.cat((-second, first), -1) * sin


def turned_backwards(x):
    """The second half turns the wrong way."""
    first, second = jnp.split(x, 2, -1)
    angles = jnp.arange(T, dtype=x.dtype)[:, None] * 0.7 ** jnp.arange(WIDTH // 2)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate((first * cos - second * sin, second * cos - first * sin), -1)


@pytest.mark.slow
def test_one_half_of_a_rotation_is_told_from_the_other():
    (region,) = explained(turned_by_halves, turned_backwards).regions
    first = region.first_wrong
    assert (first.ours.op, first.theirs.op) == ("sub", "aten.add: second half")
    assert len(region.equations) == 1


def test_an_empty_tensor_beside_the_wrong_one_is_no_hindrance():
    explanation = explained(
        lambda x: torch.tanh(x) + torch.tanh(x[:0]).sum(),
        lambda x: jnp.tanh(1.37 * x) + x[:0].sum(),
    )
    assert explanation.regions[0].first_wrong.theirs.op == "aten.tanh"


def group_of(x, epsilon, scale=1.0):
    centred = x - x.mean(-1, keepdims=True)
    variance = (centred**2).mean(-1, keepdims=True)
    return scale * centred * jax.lax.rsqrt(variance + epsilon)


# reference, port(epsilon, scale): each by torch's default epsilon of 1e-5
NORMS = {
    "layer norm": (
        lambda x: torch.nn.functional.layer_norm(x[..., :5], (5,)),
        lambda x, *wrong: group_of(x[..., :5], *wrong),
    ),
    "group norm": (
        lambda x: torch.nn.functional.group_norm(x[:, :6], 3),
        lambda x, *wrong: group_of(x[:, :6].reshape(B, 3, -1), *wrong).reshape(B, 6, WIDTH),
    ),
}


@pytest.mark.parametrize("size", [pytest.param(1.0, marks=pytest.mark.slow), 2.0, 4.0])
@pytest.mark.parametrize("name", NORMS)
def test_an_epsilon_is_the_cause_however_little_it_changes(name, size):
    theirs, ours = NORMS[name]
    explanation = explained(lambda x: theirs(size * x), lambda x: ours(size * x, 1e-6))
    causes = [(c.name, c.value, c.confirmed) for r in explanation.regions for c in r.causes]
    assert causes == [("epsilon", 1e-6, True)] or explanation.verdict is parity.Verdict.PASS
    assert causes or size == 4.0


@pytest.mark.slow
@pytest.mark.parametrize("name", NORMS)
def test_another_small_error_is_no_epsilon(name):
    theirs, ours = NORMS[name]
    waves = lambda y: y + 2e-6 * jnp.sin(7 * y)  # noqa: E731
    for wrong in (lambda x: ours(x, 1e-5, 1 - 2e-6), lambda x: waves(ours(x, 1e-5))):
        explanation = explained(theirs, wrong)
        assert explanation.verdict is parity.Verdict.FAIL
        causes = [c for r in explanation.regions for c in r.causes]
        assert not [c for c in causes if c.name == "epsilon" and c.confirmed]


@pytest.mark.slow
def test_a_port_with_complex_numbers_is_explained():
    def theirs(x):
        return torch.tanh(torch.fft.irfft(2 * torch.fft.rfft(x, norm="ortho"), n=WIDTH))

    def ours(x):
        return jnp.tanh(jnp.fft.irfft(2 * jnp.fft.rfft(x), n=WIDTH))

    (region,) = explained(theirs, ours).regions
    assert region.first_wrong.theirs.op == "aten._fft_c2r"
