"""Rows of the tests of rules: a call of an operator, and how it is written or mistaken."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import tensor

from helpers.rules.call import FLOAT64, Call
from helpers.rules.comparison import differences, text_of
from jax_attn.translate.rules.rule import Rule
from jax_attn.translate.rules.table import RULES

INF, NAN = float("inf"), float("nan")
LAST = 2**63 - 1
# Zeros, ones, ties, negatives, the kinks of activations, and what is not finite.
X = tensor([[-3.0, -1.0, -0.5, 0.0, 0.5], [1.0, 2.0, 3.0, -0.0, NAN], [1.0, 1.0, 6.0, INF, 20.0]])
KINKS = tensor([-6.0, -3.0, -1.0, -0.5, 0.0, 0.5, 1.0, 3.0, 6.0, 25.0])
F = tensor([[1.0, 2.0, -3.0], [0.0, 2.0, 0.0]])
G = tensor([[1.0, -2.0, 0.7], [2.0, 2.0, 1.5]])
COMPLEX = torch.complex(F, G)
INTS = tensor([[-7, 3, 0], [2, -2, 7]])
DIVISORS = tensor([[2, -2, 3], [-3, 5, 7]])
BOOLS = tensor([[True, False, True], [False, False, True]])
HALF = F.half()
SCALAR = tensor(2.0)
BTD = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(1))
SQUARE = tensor([[2.0, 0.3, -0.5], [0.1, 1.5, 0.7], [-0.2, 0.4, 3.0]])


def draws(seed: int) -> tuple[Any, Any]:
    """Return functions that draw floating tensors, and whole numbers below a limit."""
    generator = torch.Generator().manual_seed(seed)

    def real(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    def whole(limit: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, limit, shape, generator=generator)

    return real, whole


@dataclass(eq=False)
class Row:
    """A call by the rule of the table, and by a wrong one, if any.

    text: how the call is written, if the row says so.
    together: the rows that are compared with this one, in one program.
    found: the differences of the call, and of that by the wrong rule, once compared.
    """

    call: Call
    text: str | None
    mistaken: Call | None
    together: Sequence["Row"] = ()
    found: list[list[str]] = field(default_factory=list)

    def check(self) -> None:
        """Assert that a rule is right, says what it should, and that a mistake in it is seen."""
        if not self.found:
            rows = self.together or [self]
            calls = [call for row in rows for call in (row.call, row.mistaken) if call]
            every = iter(differences(calls))
            for row in rows:
                row.found = [next(every) for call in (row.call, row.mistaken) if call]
        right, *wrong = self.found
        assert right == []
        for problems in wrong:
            assert problems, "the mistake is not seen"
            assert not problems[0].startswith("raises"), problems
        assert self.text is None or text_of(self.call) == self.text


def row(
    name: str,
    *args: Any,
    text: str | None = None,
    wrong: Rule | None = None,
    roundoff: float = FLOAT64,
    outputs: int | None = None,
    **kwargs: Any,
) -> Row:
    """Make a row; the name is that of an operator of aten unless it names its library."""
    name = name if name.count(".") == 2 else f"aten.{name}"
    by = [RULES[name]] if wrong is None else [RULES[name], wrong]
    call, *mistaken = (Call(name, args, kwargs, rule, roundoff, outputs) for rule in by)
    return Row(call, text, *mistaken or [None])


def rows(names: str, *args: Any) -> list[Row]:
    """Make a row of each operator of these names, with the same arguments."""
    return [row(f"{name}.default", *args) for name in names.split()]


# A row that is run alone compiles its neighbours too.
TOGETHER = 32


def table(*lists: Iterable[Row]) -> pytest.MarkDecorator:
    """Make a test of each row, by its name and the shape of its first tensor."""
    rows = list(itertools.chain(*lists))
    for start in range(0, len(rows), TOGETHER):
        together = rows[start : start + TOGETHER]
        for each in together:
            each.together = together
    return pytest.mark.parametrize("row", [pytest.param(each, id=_name(each)) for each in rows])


def _name(row: Row) -> str:
    sizes = "x".join(str(size) for each in row.call.tensors[:1] for size in each.shape)
    return "-".join(filter(None, [row.call.name.removeprefix("aten."), sizes]))


def written(name: str, *args: Any, **kwargs: Any) -> str:
    """Return what the rule writes for a call, with its tensors as x0, x1, ..."""
    return text_of(row(name, *args, **kwargs).call)
