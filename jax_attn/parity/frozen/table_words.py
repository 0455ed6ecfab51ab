"""A transfer table as words: all of it but what its steps compute, which stays with the port."""

from typing import Any, NoReturn

from jax_attn.transfer import Layout
from jax_attn.transfer.table.rows import Either, Ignored, Refused, Row
from jax_attn.transfer.table.steps import Step


def words_of(layout: Layout) -> tuple[Any, ...]:
    """Return a table as tuples of words."""
    groups = tuple(
        tuple(
            tuple((r.keys, r.paths, tuple(s.name for s in r.steps), r.is_optional) for r in rows)
            for rows in group.alternatives
        )
        for group in layout.groups
    )
    refusals = tuple((item.key, item.reason) for item in layout.refusals)
    passed_over = tuple((i.key, i.reason, i.same_as) for i in layout.passed_over)
    return groups, refusals, passed_over


def layout_of(words: Any) -> Layout:
    """Return the table of `words_of`, whose steps have their names and compute nothing.

    Raises ValueError or TypeError for other words.
    """
    groups, refusals, passed_over = words
    return Layout(
        *(
            Either(tuple(tuple(map(_row, rows)) for rows in alternatives))
            for alternatives in groups
        ),
        *(Refused(*_texts(item)) for item in refusals),
        *(Ignored(*_texts(item)) for item in passed_over),
    )


def _row(words: Any) -> Row:
    keys, paths, steps, is_optional = words
    nothing = _computes_nothing
    named = tuple(Step(name, nothing, nothing, nothing, nothing) for name in _texts(steps))
    return Row(_texts(keys), _texts(paths), named, is_optional is True)


def _texts(words: Any) -> tuple[str, ...]:
    if not isinstance(words, tuple) or not all(isinstance(word, str) for word in words):
        raise TypeError(f"expected a tuple of words, got {words!r}")
    return words


def _computes_nothing(*_: Any) -> NoReturn:
    raise AssertionError("a table of words computes nothing")
