"""A merged body as statements of Python."""

import ast
from collections.abc import Callable, Sequence

from jax_attn.translate.module.merging import Branch, Condition, MergedLine, Part
from jax_attn.translate.module.narrowing import shared_end
from jax_attn.translate.rules.expression import parsed


def joined(parts: Sequence[Part]) -> list[Part]:
    """Make one branch of branches on one condition that follow each other."""
    found: list[Part] = []
    for part in parts:
        last = found[-1] if found else None
        if (
            isinstance(part, Branch)
            and isinstance(last, Branch)
            and part.condition.text == last.condition.text
        ):
            found[-1] = Branch(part.condition, [*last.then, *part.then], [*last.other, *part.other])
        else:
            found.append(part)
    return found


def statements(parts: Sequence[Part], line: Callable[[MergedLine], ast.stmt]) -> list[ast.stmt]:
    """Write a merged body.

    Args:
      parts: the body.
      line: writes one statement for all that share it.
    """
    found: list[ast.stmt] = []
    for part in parts:
        if isinstance(part, MergedLine):
            found.append(line(part))
            continue
        then, other = statements(part.then, line), statements(part.other, line)
        after = shared_end(part.condition, then, other)
        if not then and not other:
            found += after
            continue
        written = _branch(part.condition, then, other)
        found += [written, *after]
        if isinstance(written, ast.If) and isinstance(written.body[-1], ast.Return):
            # Nothing follows a return.
            found += written.orelse
            written.orelse = []
    return found


def _branch(condition: Condition, then: Sequence[ast.stmt], other: Sequence[ast.stmt]) -> ast.stmt:
    if _is_one_value(then, other):
        return _choice(condition.text, then[0], other[0])
    if not then:
        return ast.If(parsed(condition.negation), list(other), [])
    return ast.If(parsed(condition.text), list(then), list(other))


def _is_one_value(then: Sequence[ast.stmt], other: Sequence[ast.stmt]) -> bool:
    """Return whether two branches give one attribute a value, and one of them gives it None."""
    return (
        len(then) == len(other) == 1
        and isinstance(then[0], ast.Assign)
        and isinstance(other[0], ast.Assign)
        and ast.unparse(then[0].targets[0]) == ast.unparse(other[0].targets[0])
        and any(isinstance(each, ast.Constant) for each in (then[0].value, other[0].value))
    )


def _choice(condition: str, then: ast.stmt, other: ast.stmt) -> ast.stmt:
    assert isinstance(then, ast.Assign)
    assert isinstance(other, ast.Assign)
    return ast.Assign(then.targets, ast.IfExp(parsed(condition), then.value, other.value))
