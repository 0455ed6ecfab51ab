"""Say what torch.export refuses, in plain words, with the line of the reference's source."""

import keyword
import linecache
import logging
import os
import re
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any

import torch

from jax_attn.translate.tracing.export.marks import named_leaves
from jax_attn.translate.tracing.private import drafted
from jax_attn.translate.tracing.problems import TranslationError, Unsupported
from jax_attn.translate.tracing.source.frames import is_reference

_VALUE = "Python code branches on, or sizes an array by, the value of a tensor"

# What torch's message contains, and what it means to the module's author.
_WORDS = (
    (
        r"data-dependent|GuardOnDataDependent|unbacked",
        _VALUE,
    ),
    (
        r"fake tensor in the exported program",
        "a tensor reaches the graph without being traced, as by `.data`; use detach() instead",
    ),
    (
        r"pytree|not.*(registered|supported).*(input|output)|Unsupported (input|output) type",
        "an input or an output has a type that torch.export does not know; register a dataclass by "
        "torch.export.register_dataclass",
    ),
    (
        r"was assigned|were assigned|attribute.*during export",
        "forward assigns an attribute; register it as a buffer, or do not assign it",
    ),
)


def cache_problems(arguments: Mapping[str, Any]) -> list[Unsupported]:
    """Refuse caches among the inputs."""
    return [
        Unsupported("input", name, f"a cache ({type(leaf).__name__}) as an input is out of scope")
        for key, tree in arguments.items()
        for name, leaf in named_leaves(key, tree)
        if any(base.__name__.endswith("Cache") for base in type(leaf).__mro__)
    ]


def name_problems(reference: torch.nn.Module) -> list[Unsupported]:
    """Refuse tensors whose names contain a word of Python, of which torch.fx writes no code."""
    names = [name for name, _ in (*reference.named_parameters(), *reference.named_buffers())]
    return [
        Unsupported("module", name, "torch.fx cannot read a name with a word of Python; rename it")
        for name in names
        if any(map(keyword.iskeyword, name.split(".")))
    ]


@contextmanager
def refused(reference: torch.nn.Module, options: Mapping[str, Any]) -> Iterator[None]:
    """Raise TranslationError for what torch.export raises, with what else `draft_export` finds."""
    try:
        yield
    except Exception as error:
        first = _told(error)
        # In training mode one reason is enough: eval mode is written then.
        others = [] if reference.training else _drafted(reference, options, first)
        raise TranslationError([first, *others]) from error


def _told(error: BaseException) -> Unsupported:
    message = str(error)
    words = next((words for pattern, words in _WORDS if re.search(pattern, message)), None)
    first = next((line.strip() for line in message.splitlines() if line.strip()), "")
    reason = f"{words} ({first})" if words else f"{type(error).__name__}: {first}"
    stack: list[traceback.FrameSummary] = []
    cause: BaseException | None = error
    while cause is not None:
        # A traceback begins where the error is caught, in the export: above is the reference alone.
        found = traceback.extract_tb(cause.__traceback__)
        stack = [frame for frame in found if is_reference(frame.filename)] or stack
        cause = cause.__cause__ or cause.__context__
    kind = "data-dependent size" if words == _VALUE else "export"
    if not stack:
        return Unsupported(kind, "torch.export", reason)
    last = stack[-1]
    return Unsupported(
        kind, "torch.export", reason, last.filename, last.lineno or 0, (last.line or "").strip()
    )


@contextmanager
def silence() -> Iterator[None]:
    """Keep torch.export from printing: what it would say is in its errors."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), open(os.devnull, "w") as nowhere:
            warnings.simplefilter("ignore")
            with redirect_stdout(nowhere), redirect_stderr(nowhere):
                yield
    finally:
        logging.disable(disabled)


def _drafted(
    reference: torch.nn.Module, options: Mapping[str, Any], known: Unsupported
) -> list[Unsupported]:
    """Return the problems that `draft_export` goes past, each place once."""
    try:
        with silence():
            found = drafted(reference, options)
    except Exception:
        # A module that even a draft cannot take: the first refusal is all that there is to say.
        return []
    problems = []
    seen = {(known.file, known.line)}
    for kind, subject, places in found:
        place = next((each for each in reversed(places) if is_reference(each[0])), ("", 0))
        if kind == "GUARD_ADDED" or place in seen:
            continue
        seen.add(place)
        is_value = kind == "DATA_DEPENDENT_ERROR"
        words = _VALUE if is_value else kind.lower().replace("_", " ")
        problems.append(
            Unsupported(
                "data-dependent size" if is_value else "export",
                "torch.export",
                f"{words} ({subject})",
                *place,
                linecache.getline(*place).strip(),
            )
        )
    return problems
