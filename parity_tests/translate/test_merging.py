"""Bodies that differ are merged into one, with branches that leave each use its own body."""

import ast
from typing import Any

import pytest

from jax_attn.translate.module.merging.merger import (
    Branch,
    Condition,
    InseparableError,
    MergedLine,
    Merger,
    Part,
    size,
)


def _statements(text: str) -> list[ast.stmt]:
    return ast.parse(text).body


def _run(parts: list[Part], use: int) -> list[str]:
    """Return what a merged body does for one use."""
    found: list[str] = []
    for part in parts:
        if isinstance(part, MergedLine):
            found.append(ast.unparse(part.statements[use]))
        else:
            found += _run(part.then if use in part.condition.holds else part.other, use)
    return found


def _condition(*holds: int, rank: int = 0, reads: str | None = None) -> Condition:
    name = "_".join(map(str, holds))
    return Condition(frozenset(holds), f"self.c{name}", f"not self.c{name}", (rank,), reads)


BODIES = {
    0: "a = x + 1\nb = a * 2\nreturn_ = b",
    1: "a = x + 3\nreturn_ = a",
    2: "a = x + 1\nb = a * 2\nb = f(b)\nreturn_ = b",
    3: "a = x + 1\na = g(a)\nreturn_ = a",
}


def _none(*asked: Any) -> None:
    return None


def test_a_merged_body_does_for_each_use_what_its_own_does():
    bodies = {use: _statements(text) for use, text in BODIES.items()}
    known = [_condition(3), _condition(1, 3), _condition(1, 2, 3), _condition(0, 2)]
    parts = Merger(bodies, known, _none).merged()
    for use, text in BODIES.items():
        assert _run(parts, use) == text.splitlines()
    # The first statement is one, with a number that differs.
    assert isinstance(parts[0], MergedLine)
    assert set(parts[0].statements) == set(BODIES)
    assert size(parts) < sum(map(len, bodies.values()))


def test_an_argument_that_was_assigned_is_not_asked_for():
    bodies = {0: _statements("a = 1\nb = f(a)"), 1: _statements("a = 1\nb = g(a)")}
    known = [_condition(0, rank=0, reads="a"), _condition(0, rank=1)]
    branch = Merger(bodies, known, _none).merged()[-1]
    assert isinstance(branch, Branch)
    assert branch.condition is known[1]
    with pytest.raises(InseparableError):
        Merger(bodies, known[:1], _none).merged()


def test_indices_of_lists_of_modules_are_no_numbers_that_differ():
    bodies = {0: _statements("x = self.layers[0](x)"), 1: _statements("x = self.layers[1](x)")}
    (branch,) = Merger(bodies, [_condition(0)], _none).merged()
    assert isinstance(branch, Branch)
