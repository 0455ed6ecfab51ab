"""Wrong ports of small modules: none passes without a word on inputs that hide its mistake.

The same port made right never fails there. On what `suggest_inputs` makes of the reference the
wrong one fails, and the right one passes without a note.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn

from helpers.attack.by_hand import (
    Attention,
    D,
    Drawing,
    Experts,
    Hybrid,
    Remembering,
    attention,
    experts,
    hybrid,
)
from helpers.attack.port import Port, randomised, table
from helpers.parity.findings import kinds
from helpers.parity.one_reference import Once
from jax_attn import parity

B, T, S = 3, 11, 7
ONCE = Once()
rng = np.random.default_rng(0)
X, MEMORY = rng.standard_normal((B, T, D)), rng.standard_normal((B, S, D))
SHOWN = (rng.random((B, T, T)) < 0.7) | np.eye(T, dtype=bool)
EMPTIED = SHOWN & (np.arange(T)[:, None] != 3)


@cache
def reference_of(build: Callable, options: tuple) -> nn.Module:
    return randomised(build(**dict(options)))


@cache
def suggested(reference: nn.Module) -> dict:
    return parity.suggest_inputs(reference)


@dataclass(frozen=True)
class Row:
    """wrong: what the port does. poor: inputs that hide it. says: the kind of what tells.

    options: of `Attention`, where that is the module. suggestions: whether inputs can reveal it.
    like: a row that it resembles, so that only --long tries it on suggestions.
    """

    wrong: str
    poor: dict
    says: str
    options: dict = field(default_factory=dict)
    build: Callable | None = None
    forward: Callable | None = None
    gradients: bool = False
    suggestions: bool = True
    like: str = ""

    @property
    def reference(self) -> nn.Module:
        """One for all rows of the same options."""
        return reference_of(self.build or Attention, tuple(self.options.items()))

    def check(
        self, reference: nn.Module, wrong: str, inputs: dict, *, gradients: bool = False
    ) -> parity.Result:
        forward = self.forward or (lambda port, **given: attention(port, self.options, **given))
        return parity.check(
            reference,
            Port(reference, forward, wrong),
            inputs,
            layout=table(reference),
            gradients=gradients,
            transforms=("jit",),
        )


def of_three_experts():
    """Tokens that the router of `Experts` sends to the first three of the five."""
    x = rng.standard_normal((200, D)).astype("float32")
    chosen = randomised(Experts()).gate(torch.from_numpy(x)).argmax(-1).numpy()
    return x[chosen < 3][: B * T].reshape(B, T, D)


UNCAPPED = {"fill": -np.inf, "nan_to_num": True}
ROWS = {
    "a row of which all is hidden by a finite number": Row(
        "zeros in empty rows", {"x": X, "mask": EMPTIED}, ""
    ),
    "the mean for a row of which all is hidden": Row(
        "mean in empty rows", {"x": X, "mask": EMPTIED}, "", UNCAPPED
    ),
    "no row of which all is hidden": Row(
        "zeros in empty rows",
        {"x": X, "mask": SHOWN},
        "no-empty-query",
        like="a row of which all is hidden by a finite number",
    ),
    "no row of which all is hidden, where 0 is right": Row(
        "nan_to_num left out", {"x": X, "mask": SHOWN}, "idle-branch", UNCAPPED
    ),
    "a language that is 0 throughout": Row(
        "language ignored",
        {"x": X, "language_id": np.zeros((B, T), int)},
        "input-ignored",
        {"languages": 5},
    ),
    "a window that holds all": Row("window left out", {"x": X}, "idle-branch", {"window": 17}),
    "a window 1 wider, of all": Row(
        "window 1 wider", {"x": X}, "idle-branch", {"window": 11}, like="a window that holds all"
    ),
    "a window 1 narrower, of all": Row(
        "window 1 narrower", {"x": X}, "idle-branch", {"window": 12}, like="a window that holds all"
    ),
    "a softcap of small scores": Row(
        "softcap left out", {"x": 0.01 * X}, "softcap", {"softcap": 5.0}
    ),
    "a clamp of small scores": Row(
        "clamp left out", {"x": 0.01 * X}, "idle-branch", {"clamp": 1.0}
    ),
    "distances below the clip": Row("clip left out", {"x": X[:, :3]}, "idle-branch", {"clip": 3}),
    "an epsilon beside large numbers": Row(
        "epsilon 1e-12", {"x": 1e4 * X}, "epsilon", {"eps": 1e-5}
    ),
    "one row in the batch": Row("attention across the batch", {"x": X[:1]}, "one-row"),
    "as many rows as queries": Row(
        "batch and time swapped", {"x": rng.standard_normal((5, 5, D))}, ""
    ),
    "keys that are the queries": Row("values from x", {"x": X, "memory": X}, "swapped-inputs"),
    "a fault beyond the lengths that are tried": Row(
        "the last keys forgotten beyond 64", {"x": X}, "scope", suggestions=False
    ),
    "experts that no token goes to": Row(
        "experts 3 and 4 swapped",
        {"x": of_three_experts()},
        "unreached-weights",
        {},
        Experts,
        experts,
        gradients=True,  # those of 0 tell
    ),
    "BatchNorm by the statistics of the batch": Row(
        "statistics of the batch",
        {"images": rng.standard_normal((2, 3, 9, 9))},
        "",
        {},
        Hybrid,
        hybrid,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_a_wrong_port_does_not_pass_without_a_word(name, monkeypatch):
    row = ROWS[name]
    ONCE.patch(monkeypatch)
    reference = row.reference
    wrong, right = (
        row.check(reference, mistake, row.poor, gradients=row.gradients)
        for mistake in (row.wrong, "")
    )
    assert right.verdict != "FAIL", str(right)
    assert (wrong.verdict == "FAIL") or row.says in kinds(wrong), str(wrong)
    assert row.says or wrong.verdict == "FAIL"


def pytest_generate_tests(metafunc):
    if "suggesting" in metafunc.fixturenames:
        long = metafunc.config.getoption("--long")
        rows = [name for name, row in ROWS.items() if row.suggestions and (long or not row.like)]
        metafunc.parametrize("suggesting", rows)


@pytest.mark.slow
def test_suggested_inputs_tell_right_from_wrong(suggesting, monkeypatch):
    row = ROWS[suggesting]
    ONCE.patch(monkeypatch)
    reference = row.reference
    inputs = suggested(reference)
    right = row.check(reference, "", inputs, gradients=True)
    assert (right.verdict, kinds(right, "failure", "doubt", "note")) == ("PASS", []), str(right)
    if row.wrong in ("batch and time swapped", "values from x"):  # other lengths do not even fit
        with pytest.raises((TypeError, ValueError), match=r"shape|Size of label"):
            row.check(reference, row.wrong, inputs)
    else:
        wrong = row.check(reference, row.wrong, inputs, gradients=True)
        assert "FAIL" in {t.verdict for t in wrong.tensors if t.kind == "output"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Remembering, Drawing])
def test_what_a_call_keeps_or_draws_is_seen(kind):
    reference = randomised(Attention())
    port = kind(reference, lambda port, x: attention(port, {}, x))
    result = parity.check(reference, port, {"x": X}, transforms=("jit",))
    assert result.verdict == "FAIL"
