"""An integer that a port never reads does not pass unseen: both sides are given other values."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from helpers.parity.findings import kinds, sentences
from helpers.parity.one_reference import Once
from jax_attn.parity import Verdict, check
from jax_attn.parity.judge.result import Result

B, T, D = 3, 7, 5
rng = np.random.default_rng(0)
X, TABLE = rng.standard_normal((B, T, D)), rng.standard_normal((2 * T, D)).astype(np.float32)
ALIKE, IN_ORDER = np.zeros((B, T), int), np.tile(np.arange(T), (B, 1))


class Calls(nnx.Module):
    """A port without weights: its call is what is checked."""


REFERENCE, ONCE = torch.nn.Module(), Once()


@cache
def of_torch(call):
    """With torch's softmax and table."""
    return lambda _, x, **integers: call(
        torch.softmax, torch.from_numpy(TABLE).to(x), x, **integers
    )


@pytest.fixture(autouse=True)
def prepared_once(monkeypatch):
    ONCE.patch(monkeypatch)


def compared(call, port_call, **integers) -> Result:
    return check(
        REFERENCE,
        Calls(),
        {"x": X, **integers},
        reference_call=of_torch(call),
        port_call=lambda _, x, **rest: port_call(jax.nn.softmax, jnp.asarray(TABLE), x, **rest),
        gradients=False,
        transforms=("eager",),
    )


def unvaried(result: Result) -> list[str]:
    return sentences(result, "input-not-varied")


def attend(softmax, x):
    return softmax(x @ x.mT, -1) @ x


def embedded(softmax, table, x, kind):
    return attend(softmax, x + table[kind])


def _turned(x, positions):
    """The first two features by an angle: relative positions alone matter."""
    xp = torch if isinstance(x, torch.Tensor) else jnp
    angle = 1.0 * positions
    cos, sin = xp.cos(angle), xp.sin(angle)
    return xp.stack([cos * x[..., 0] - sin * x[..., 1], sin * x[..., 0] + cos * x[..., 1]], -1)


def rotary(softmax, table, x, kind):
    y = _turned(x, kind)
    return softmax(y @ y.mT, -1) @ x


def octave(softmax, table, x, kind):
    """Integers made of integers through floating numbers: perturbed runs keep the reference's."""
    xp = torch if isinstance(x, torch.Tensor) else jnp
    return attend(softmax, x + xp.floor(xp.log2(kind + 1.5))[..., None])


def of_one_row(call):
    return lambda softmax, table, x, kind: call(softmax, table, x, kind[:1])


def as_if(call, given):
    """The port that is right for what is given here, and reads nothing."""
    return lambda softmax, table, x, kind: call(softmax, table, x, jnp.asarray(given))


WRONG = {
    "token types, all 0": (embedded, as_if(embedded, ALIKE), ALIKE),
    "token types, all 1": (embedded, as_if(embedded, ALIKE + 1), ALIKE + 1),
    "one language": (embedded, as_if(embedded, [[4]]), np.array([[4]])),
    "learned positions": (embedded, as_if(embedded, IN_ORDER), IN_ORDER),
    "learned positions of one row": (embedded, of_one_row(embedded), IN_ORDER),
    "rotary positions": (rotary, as_if(rotary, IN_ORDER), IN_ORDER),
    "rotary positions of one row": (rotary, of_one_row(rotary), IN_ORDER),
    "buckets of positions": (octave, as_if(octave, IN_ORDER), IN_ORDER),
}


@pytest.mark.slow
@pytest.mark.parametrize("row", WRONG)
def test_a_port_that_does_not_read_an_integer_fails_and_a_right_one_passes(row):
    call, wrong, kind = WRONG[row]
    result = compared(call, wrong, kind=kind)
    assert result.verdict is Verdict.FAIL
    assert {*kinds(result, "failure")} == {"input-ignored"}
    assert result.failures[0].startswith("with other values of 'kind': eager output: error over")
    result = compared(call, call, kind=kind)
    assert (result.verdict, unvaried(result)) == (Verdict.PASS, []), str(result)


@pytest.mark.slow
def test_of_several_the_one_that_is_not_read_is_named():
    def call(softmax, table, x, kind, positions):
        return attend(softmax, x + table[kind] + table[positions])

    def wrong(softmax, table, x, kind, positions):
        return call(softmax, table, x, 0 * kind, positions)

    result = compared(call, wrong, kind=ALIKE, positions=IN_ORDER)
    assert len(result.failures) == 1
    assert "'kind'" in result.failures[0]
    assert compared(call, call, kind=ALIKE, positions=IN_ORDER).failures == ()


def test_an_integer_that_the_reference_does_not_read_is_noted():
    def call(softmax, table, x, kind):
        return attend(softmax, x)

    result = compared(call, call, kind=ALIKE)
    (note,) = unvaried(result)
    assert "other values change no output" in note
    assert unvaried(compared(call, call, kind=rng.integers(0, 2, (B, T)))) == []


def packed(softmax, table, x, kind):
    """A sequence starts wherever positions do not go on by one, as some decoders read them."""
    y = _turned(x, kind)
    xp = torch if isinstance(x, torch.Tensor) else jnp
    starts = xp.cumsum(kind[:, 1:] - kind[:, :-1] != 1, 1)
    sequence = xp.concatenate([0 * starts[:, :1], starts], 1)
    others = sequence[:, :, None] != sequence[:, None]
    return softmax(xp.where(others, -xp.inf, y @ y.mT), -1) @ x


@pytest.mark.slow
def test_positions_that_also_start_sequences_are_noted_and_gaps_are_the_remedy():
    """A right port of positions alone would fail out of order: it is not tried."""
    result = compared(packed, rotary, kind=IN_ORDER)
    (note,) = unvaried(result)
    assert result.verdict is Verdict.PASS
    assert "to show it, use positions with gaps" in note
    gaps = np.cumsum(rng.integers(1, 4, (B, T)), 1)
    assert unvaried(compared(packed, packed, kind=gaps)) == []


def test_a_port_that_refuses_other_values_is_noted():
    def zero(kind):
        if kind.any():
            raise ValueError("one language alone")
        return kind

    def strict(softmax, table, x, kind):
        return embedded(softmax, table, x, jax.pure_callback(zero, kind, kind))

    (note,) = unvaried(compared(embedded, strict, kind=ALIKE))
    reads = "whether the port reads input 'kind' was not checked: "
    assert note.startswith(f"{reads}with other values the port raises ")
    assert "one language alone" in note


def test_an_index_of_one_row_has_no_other_value():
    def call(softmax, table, x, kind):
        return embedded(softmax, table[:1], x, kind)

    assert unvaried(compared(call, call, kind=ALIKE)) == []
