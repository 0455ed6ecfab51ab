"""Tables as the Python code that makes them."""

from collections.abc import Iterable, Sequence

from jax_attn.transfer.table.layout import Layout
from jax_attn.transfer.table.rows import Row

_WIDTH = 100
_BREAK = ",\n         "  # between names of one argument; quoted names have no newline


def source(layout: Layout, comments: Iterable[str]) -> str:
    """Return the source of a module that defines `layout` as LAYOUT, followed by comments.

    layout: has only rows and ties, whose steps are `jax_attn.transfer`'s own.
    """
    rows = [r for group in layout.groups for r in group.rows]
    calls = [("row", row_arguments(r)) for r in rows]
    calls += [("tied", [quoted(t.key), quoted(t.same_as)]) for t in layout.passed_over]
    names = sorted({"Layout", *dict(calls), *(name for r in rows for name in step_names(r))})
    imports = f"from jax_attn.transfer import {', '.join(names)}"
    lines = [
        imports if len(imports) <= _WIDTH else _listed("from jax_attn.transfer import ", names)
    ]
    lines += ["", f"LAYOUT = Layout({'' if calls else ')'}"]
    for function, arguments in calls:
        lines += call_lines(function, arguments)
    lines += [")"] if calls else []
    return "\n".join([*lines, *(f"# {comment}" for comment in comments), ""])


def call_lines(function: str, arguments: Sequence[str]) -> list[str]:
    """Return a call among the arguments of another, on one line if it fits."""
    line = f"    {function}({', '.join(arguments)}),"
    if len(line) > _WIDTH:
        line = f"{_listed(f'    {function}', arguments)},"
    return line.split("\n")


def row_call(r: Row) -> str:
    """Return the row as code, on one line."""
    return f"row({', '.join(row_arguments(r))})".replace(_BREAK, ", ")


def quoted(name: str) -> str:
    """Return a name as a string literal, escaped so that a name from a file cannot become code."""
    plain = name.isprintable() and not {'"', "\\"} & set(name)
    return f'"{name}"' if plain else ascii(name)


def step_names(r: Row) -> list[str]:
    """Return the names to import for a row's steps; a step may be a call, such as in_parts(4)."""
    return [step.name.partition("(")[0] for step in r.steps]


def row_arguments(r: Row) -> list[str]:
    """Return the arguments of `row`, as code."""
    return [_names(r.keys), _names(r.paths), *(step.name for step in r.steps)]


def _names(names: Sequence[str]) -> str:
    if len(names) == 1:
        return quoted(names[0])
    listed = [quoted(name) for name in names]
    line = f"({', '.join(listed)})"
    return line if len(line) < _WIDTH - 8 else f"({_BREAK.join(listed)})"


def _listed(opening: str, items: Iterable[str]) -> str:
    """Put items in parentheses, one per line, indented deeper than the opening line."""
    margin = " " * (len(opening) - len(opening.lstrip()))
    return "\n".join([f"{opening}(", *(f"{margin}    {item}," for item in items), f"{margin})"])
