"""What torch.export refuses, in plain words, with the line of the reference's source."""

import re
import traceback
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from jax_attn.translate.frames import is_reference
from jax_attn.translate.marks import named_leaves
from jax_attn.translate.problems import TranslationError, Unsupported

# What torch's message contains, and what it means to the module's author.
_WORDS = (
    (
        r"data-dependent|GuardOnDataDependent|unbacked",
        "Python code branches on, or sizes an array by, the value of a tensor",
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


def refusal(
    error: Exception, reference: torch.nn.Module, options: Mapping[str, Any]
) -> TranslationError:
    """Return the error that says what torch.export refuses, with what else `draft_export` finds."""
    return TranslationError([_told(error), *_drafted(reference, options)])


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
    kind = "data-dependent size" if words and "value of a tensor" in words else "export"
    if not stack:
        return Unsupported(kind, "torch.export", reason)
    last = stack[-1]
    return Unsupported(
        kind, "torch.export", reason, last.filename, last.lineno or 0, (last.line or "").strip()
    )


def _drafted(reference: torch.nn.Module, options: Mapping[str, Any]) -> list[Unsupported]:
    """Return the problems that `draft_export` goes past, without those that are no problem here."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.export.draft_export(reference, **options)
        failures = program._report.failures  # type: ignore[attr-defined]
    except Exception:
        # A module that even a draft cannot take: the first refusal is all that there is to say.
        return []
    problems = []
    for failure in failures:
        if failure.failure_type.name == "GUARD_ADDED":
            continue
        frames = list(failure.data.get("user_stack") or failure.data.get("stack") or ())
        reason = failure.failure_type.name.lower().replace("_", " ")
        asked = failure.data.get("expr") or failure.data.get("op")
        problems.append(_failure(f"{reason}: {asked}", frames))
    return problems


def _failure(reason: str, frames: list[Any]) -> Unsupported:
    for frame in reversed(frames):
        file = getattr(frame, "filename", None)
        if isinstance(file, str) and is_reference(file):
            line = (frame.line or "").strip()
            return Unsupported("export", "torch.export", reason, file, frame.lineno, line)
    return Unsupported("export", "torch.export", reason)
