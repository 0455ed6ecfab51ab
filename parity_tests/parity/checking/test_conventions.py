"""A failure names the convention at a kink if the port's gradients differ only by it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from helpers.parity.findings import kinds, sentences
from helpers.parity.functions import PortFunction, TorchFunction
from jax_attn.parity import Verdict, check

F = torch.nn.functional
RNG = np.random.default_rng(0)
ZEROS = RNG.random((3, 7)) < 0.3
X = np.where(ZEROS, 0.0, RNG.standard_normal((3, 7))).astype(np.float32)
HALVES = (np.round(2 * RNG.standard_normal((3, 9))) / 2).astype(np.float32)


def clip(x, low, high, inside):
    return jnp.where(inside, x, jax.lax.stop_gradient(jnp.clip(x, low, high)))


# name -> reference, JAX's usual expression, one with torch's derivative, inputs
ROWS = {
    "abs": (torch.abs, jnp.abs, lambda x: jnp.sign(x) * x, X),
    "leaky_relu": (
        lambda x: F.leaky_relu(x, 0.1),
        lambda x: jax.nn.leaky_relu(x, 0.1),
        lambda x: jnp.where(x > 0, x, 0.1 * x),
        X,
    ),
    "clamp": (
        lambda x: x.clamp(0, 1),
        lambda x: jnp.clip(x, 0, 1),
        lambda x: clip(x, 0, 1, (x >= 0) & (x <= 1)),
        X,
    ),
    "relu": (lambda x: x.relu(), lambda x: jnp.maximum(x, 0), jax.nn.relu, X),
    "hardtanh": (
        F.hardtanh,
        lambda x: jnp.clip(x, -1, 1),
        lambda x: clip(x, -1, 1, (x > -1) & (x < 1)),
        HALVES,
    ),
}


TIED = (np.round(1.5 * RNG.standard_normal((3, 7, 4))) + 0.0).astype(np.float32)


def first_of(x):
    return jnp.take_along_axis(x, x.argmax(1)[:, None], 1)[:, 0]


def last_of(x):
    return first_of(x[:, ::-1])


def ranked(x, first, last=None, turned=False):
    """Sort along axis 1, equal numbers from the first or the last, and take some ranks."""
    order = x.shape[1] - 1 - jnp.argsort(x[:, ::-1], 1) if turned else jnp.argsort(x, 1)
    return jnp.take_along_axis(x, order, 1)[:, first:last]


def largest(x):
    return jnp.moveaxis(jax.lax.top_k(jnp.moveaxis(x, 1, -1), 3)[0], -1, 1)


def running(x):
    """Take the last of the numbers that equal a running maximum, as torch does."""
    at = jnp.where(x == jax.lax.cummax(x, 1), jnp.arange(7)[:, None], -1)
    return jnp.take_along_axis(x, jax.lax.cummax(at, 1), 1)


def in_pairs(x):
    return x[:, :6].reshape(3, 3, 2, 4).max(2)


def halves(of):
    return lambda x: of(x[:, :3], x[:, 3:6])


# name -> reference, another convention, torch's own
TIES = {
    "max": (lambda x: x.max(1).values, lambda x: x.max(1), first_of),
    "min": (lambda x: x.min(dim=1)[0], lambda x: x.min(1), lambda x: -first_of(-x)),
    "amax": (lambda x: x.amax(1), first_of, lambda x: x.max(1)),
    "max of all": (lambda x: x.max(), lambda x: x.ravel()[x.argmax()], jnp.max),
    "maximum": (
        halves(torch.maximum),
        halves(lambda x, y: jnp.where(x >= y, x, y)),
        halves(jnp.maximum),
    ),
    "minimum, the second": (
        halves(torch.minimum),
        halves(lambda x, y: jnp.where(x < y, x, y)),
        halves(jnp.minimum),
    ),
    "max of two": (
        halves(torch.max),
        halves(lambda x, y: jnp.where(x > y, x, y)),
        halves(jnp.maximum),
    ),
    "amax, the last": (lambda x: x.amax(1), last_of, lambda x: x.max(1)),
    "argmax": (lambda x: x.gather(1, x.argmax(1, keepdim=True))[:, 0], last_of, first_of),
    "sort": (
        lambda x: x.sort(1).values,
        lambda x: ranked(x, 0, turned=True),
        lambda x: ranked(x, 0),
    ),
    "argsort": (
        lambda x: x.gather(1, x.argsort(dim=1, stable=True)),
        lambda x: ranked(x, 0, turned=True),
        lambda x: ranked(x, 0),
    ),
    "kthvalue": (
        lambda x: x.kthvalue(3, 1, keepdim=True).values,
        lambda x: ranked(x, 2, 3),
        None,
    ),
    "median": (
        lambda x: x.median(1, keepdim=True).values,
        lambda x: ranked(x, 3, 4, turned=True),
        None,
    ),
    "median of all": (lambda x: x[:, :, 0].median(), lambda x: jnp.median(x[:, :, 0]), None),
    "topk": (lambda x: x.topk(3, 1).values, largest, None),
    "cummax": (lambda x: x.cummax(1).values, lambda x: jax.lax.cummax(x, 1), running),
    "cummin": (
        lambda x: x.cummin(1).values,
        lambda x: jnp.minimum.accumulate(x, 1),
        lambda x: -running(-x),
    ),
    "fmax": (
        halves(torch.fmax),
        halves(jnp.maximum),
        halves(lambda x, y: jnp.where(x >= y, x, y)),
    ),
    "adaptive_max_pool": (
        lambda x: F.adaptive_max_pool1d(x[:, :6].mT, 3).mT,
        in_pairs,
        lambda x: first_of(x[:, :6].reshape(9, 2, 4)).reshape(3, 3, 4),
    ),
    "max_pool": (
        lambda x: F.max_pool1d(x.mT, 2).mT,
        in_pairs,
        lambda x: first_of(x[:, :6].reshape(9, 2, 4)).reshape(3, 3, 4),
    ),
}


LIKE_OTHERS = (
    *("amax, the last", "argmax", "argsort", "kthvalue", "median", "median of all"),
    *("cummin", "fmax", "adaptive_max_pool"),
)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in LIKE_OTHERS else n for n in TIES]
)
def test_who_gets_the_gradient_of_equal_numbers_is_a_convention(name):
    reference, other, torchs = TIES[name]
    result = judged(reference, other, TIED)
    assert (result.verdict, kinds(result).count("kink")) == (Verdict.FAIL, 1), str(result)
    assert "come from equal numbers" in sentences(result, "kink")[0]
    if torchs is not None:  # torch has an order that an expression in JAX has too
        assert judged(reference, torchs, TIED).verdict is Verdict.PASS
    twice = judged(reference, lambda x: 2 * other(x) - jax.lax.stop_gradient(other(x)), TIED)
    assert (twice.verdict, kinds(twice).count("kink")) == (Verdict.FAIL, 0), str(twice)


def test_maxima_without_ties_or_numbers_are_no_convention():
    def reference(x):
        pooled = F.max_pool1d(x.mT[..., :3], 2, ceil_mode=True).sum()
        return x.amax(1) + x[:0].maximum(x[:0]).sum() + x.sum().max() + pooled

    result = judged(reference, lambda x: 2 * x.max(1), HALVES[:, :, None])
    assert (result.verdict, kinds(result).count("kink")) == (Verdict.FAIL, 0), str(result)


def test_an_expert_of_two_with_equal_scores_is_a_convention():
    """The outputs differ too: the other of two experts is taken."""
    experts = RNG.standard_normal((4, 5)).astype(np.float32)

    def reference(x):
        scores, at = x.topk(1, -1)
        return scores * torch.from_numpy(experts)[at[..., 0]]

    def port(x, turned):
        at = (3 - x[..., ::-1].argmax(-1)) if turned else x.argmax(-1)
        return jnp.take_along_axis(x, at[:, None], 1) * jnp.array(experts)[at]

    x = np.where(np.arange(4) < 2, 1.0, RNG.random((7, 4))).astype(np.float32)
    results = [judged(reference, lambda x, turned=turned: port(x, turned), x) for turned in (0, 1)]
    assert Verdict.FAIL in [result.verdict for result in results]
    assert all("kink" in kinds(r) for r in results if r.verdict is Verdict.FAIL), f"{results}"


@pytest.mark.slow
def test_integers_that_are_sorted_keep_their_order():
    """Another order of equal numbers is none of their ranks, which are integers."""

    def reference(x):
        ranks = x.argsort(dim=1).argsort(dim=1).sort(1).values
        return x.sort(1).values * (1 + ranks)

    def port(x):
        return ranked(x, 0, turned=True) * (1.0 + jnp.arange(7)[:, None])

    result = judged(reference, port, TIED)
    assert (result.verdict, kinds(result).count("kink")) == (Verdict.FAIL, 1), str(result)


def test_ties_and_kinks_are_named_together():
    result = judged(
        lambda x: x.max(1).values + x.abs().amax(1),
        lambda x: x.max(1) + first_of(jnp.abs(x)),
        TIED,
    )
    (said,) = sentences(result, "kink")
    assert " of max (" in said
    assert " of amax (" in said


def judged(reference, port, x):
    return check(TorchFunction(reference), PortFunction(port), (x,), transforms=("jit",))


@pytest.mark.parametrize("name", ROWS)
def test_a_usual_expression_fails_by_its_convention_and_torchs_passes(name):
    reference, usual, torchs, x = ROWS[name]
    result = judged(reference, usual, x)
    assert (result.verdict, kinds(result).count("kink")) == (Verdict.FAIL, 1), str(result)
    (said,) = sentences(result, "kink")
    assert f"arguments of {name} (" in said
    assert judged(reference, torchs, x).verdict is Verdict.PASS


def test_the_numbers_at_the_kink_are_counted():
    (said,) = sentences(judged(torch.abs, jnp.abs, X), "kink")
    assert f" {ZEROS.sum()} of {ZEROS.size} arguments" in said


def test_one_convention_of_two_is_named():
    def reference(x):
        return x.abs() + 2 * x.relu()

    (said,) = sentences(judged(reference, lambda x: jnp.abs(x) + 2 * jax.nn.relu(x), X), "kink")
    assert "of abs (" in said
    assert "of relu (" not in said


def test_another_mistake_is_no_convention():
    wrong = judged(torch.abs, lambda x: jnp.abs(jax.lax.stop_gradient(x)), X)
    assert wrong.verdict is Verdict.FAIL
    assert "kink" not in kinds(wrong)


def attend(x, hidden):
    """Add a large negative number to hidden scores, as transformers does."""
    return (x @ x.mT + hidden[:, None] * torch.finfo(torch.float32).min).softmax(-1) @ x


def replaced(x, hidden):
    scores = jnp.where(hidden[:, None] == 1, jnp.finfo(jnp.float32).min, x @ x.swapaxes(1, 2))
    return jax.nn.softmax(scores) @ x


def zeroed(x, hidden):
    seen = hidden[:, None] == 0
    return jnp.where(seen, jax.nn.softmax(jnp.where(seen, x @ x.swapaxes(1, 2), -1e9)), 0.0) @ x


HIDDEN = np.array([[0, 0, 1, 0, 1], [0, 1, 0, 0, 0], [1, 1, 1, 1, 1]], np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("port", [replaced, zeroed])
def test_rows_without_keys_are_named_if_the_port_differs_only_there(port):
    x = RNG.standard_normal((3, 5, 4)).astype(np.float32)

    def reference(x):
        return attend(x, torch.from_numpy(HIDDEN))

    result = judged(reference, lambda x: port(x, HIDDEN), x)
    assert (result.verdict, kinds(result).count("empty-rows")) == (Verdict.FAIL, 1), str(result)
    wrong = judged(reference, lambda x: 1.01 * port(x, HIDDEN), x)
    assert "empty-rows" not in kinds(wrong)
