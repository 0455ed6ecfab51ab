"""Write a merged body as statements, and put conditions on the short parts that differ."""

import ast
import copy
from collections.abc import Callable, Sequence

from jax_attn.translate.module.merging.merger import Branch, Condition, MergedLine, Part
from jax_attn.translate.rules.expression import parsed, stored

_SHORT = 40
_LINE = 76
_LONG = 100
"""A statement that is longer is never written twice."""


def shared_end(condition: Condition, then: list[ast.stmt], other: list[ast.stmt]) -> list[ast.stmt]:
    """Take the statements from the ends of two branches that differ in one short part only.

    Returns them, each with the part as `a if condition else b`. The branches lose them.
    """
    found: list[ast.stmt] = []
    while then and other:
        before = {name for each in (*then[:-1], *other[:-1]) for name in stored(each)}
        if condition.reads in before:
            break
        one = _shared(condition, then[-1], other[-1])
        if one is None:
            break
        is_last = len(then) == 1 or len(other) == 1
        if not (is_last and len(_text(one)) <= _LINE) and len(_text(then[-1])) <= _LONG:
            break
        found.insert(0, one)
        del then[-1], other[-1]
    return found


def _shared(condition: Condition, one: ast.stmt, other: ast.stmt) -> ast.stmt | None:
    """Return what two statements share, with a condition where they differ."""
    if not isinstance(one, (ast.Assign, ast.Return)) or type(one) is not type(other):
        return None
    assert isinstance(other, (ast.Assign, ast.Return))
    if isinstance(one, ast.Assign) and _text(one.targets[0]) != _text(other.targets[0]):  # type: ignore[union-attr]
        return None
    if type(one.value) is not type(other.value):
        return None
    made = copy.deepcopy(one)
    if made.value is None or one.value is None or other.value is None:
        return None
    place = _difference(made.value, other.value)
    if place is None:
        return None
    parent, field, index, (mine, theirs) = place
    texts = _text(mine), _text(theirs)
    whole = _text(one.value)
    if max(map(len, texts)) > _SHORT or len(whole) < sum(map(len, texts)):
        return None
    if any(isinstance(node, ast.IfExp) for each in (mine, theirs) for node in ast.walk(each)):
        return None
    chosen = ast.IfExp(parsed(condition.text), mine, theirs)
    if index is None:
        setattr(parent, field, chosen)
    else:
        getattr(parent, field)[index] = chosen
    return made


_Place = tuple[ast.AST, str, int | None, tuple[ast.expr, ast.expr]]


def _difference(one: ast.AST, other: ast.AST) -> _Place | None:
    """Return the one place below two trees where they differ, with what each has there."""
    found: list[tuple[str, int | None, ast.AST, ast.AST]] = []
    for field, value in ast.iter_fields(one):
        theirs = getattr(other, field)
        if not isinstance(value, (ast.AST, list)):
            if value != theirs:
                return None
            continue
        pairs: Sequence[tuple[int | None, ast.AST, ast.AST]]
        if isinstance(value, list):
            if len(value) != len(theirs):
                return None
            pairs = [(n, *pair) for n, pair in enumerate(zip(value, theirs, strict=True))]
        else:
            pairs = [(None, value, theirs)]
        found += [(field, n, a, b) for n, a, b in pairs if _text(a) != _text(b)]
    if len(found) != 1:
        return None
    ((field, index, mine, theirs),) = found
    if type(mine) is type(theirs) and (below := _difference(mine, theirs)) is not None:
        return below
    if isinstance(mine, ast.expr) and isinstance(theirs, ast.expr):
        return one, field, index, (mine, theirs)
    return None


def _text(node: ast.AST) -> str:
    return ast.dump(node) if isinstance(node, (ast.operator, ast.cmpop)) else ast.unparse(node)


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
