"""Select the parameters whose gradients a check compares."""

from collections.abc import Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

import torch

from jax_attn.parity.judge.finding import Finding


def chosen(module: torch.nn.Module, patterns: str | Sequence[str]) -> frozenset[str]:
    """Return the names of the parameters that match any of the `fnmatch` patterns.

    Raises TypeError if the patterns are not strings, and ValueError naming each that matches none.
    """
    listed = [patterns] if isinstance(patterns, str) else patterns
    is_list = isinstance(listed, list | tuple)
    if not is_list or not listed or not all(isinstance(pattern, str) for pattern in listed):
        expected = "a pattern of parameter names or a tuple of such patterns"
        raise TypeError(f"parameters: expected {expected}, got {patterns!r}")
    names = [name for name, _ in module.named_parameters()]
    problems = []
    for pattern in listed:
        if not any(fnmatchcase(name, pattern) for name in names):
            nearest = get_close_matches(pattern, names, n=3, cutoff=0) or ["none"]
            problems.append(
                f"parameters: expected a pattern of the reference's parameters, got {pattern!r}, "
                f"which matches none of {len(names)}; nearest: {', '.join(nearest)}"
            )
    if problems:
        raise ValueError("\n".join(problems))
    return frozenset(
        name for name in names if any(fnmatchcase(name, pattern) for pattern in listed)
    )


def selected(names: frozenset[str], total: int) -> Finding:
    """Return a note that says how many of how many gradients are compared."""
    return Finding(
        "parameters-selected",
        f"the gradients of {len(names)} of {total} parameters were compared: those that the "
        "argument `parameters` selects",
    )
