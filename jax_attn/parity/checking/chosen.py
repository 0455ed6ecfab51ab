"""Which parameters' gradients are compared, where a check asks for some."""

from collections.abc import Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

import torch

from jax_attn.parity.judge.finding import Finding


def chosen(module: torch.nn.Module, patterns: str | Sequence[str]) -> frozenset[str]:
    """The parameters whose names match any of the patterns, as `fnmatch` reads them.

    Raises TypeError where these are no strings, ValueError naming each that matches none.
    """
    listed = [patterns] if isinstance(patterns, str) else patterns
    is_list = isinstance(listed, list | tuple)
    if not is_list or not listed or not all(isinstance(pattern, str) for pattern in listed):
        expected = "a pattern of parameters' names or a tuple of some"
        raise TypeError(f"parameters: expected {expected}, got {patterns!r}")
    names = [name for name, _ in module.named_parameters()]
    problems = []
    for pattern in listed:
        if not any(fnmatchcase(name, pattern) for name in names):
            nearest = get_close_matches(pattern, names, n=3, cutoff=0) or ["none at all"]
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
    """Note how many of how many gradients are compared."""
    return Finding(
        "parameters-selected",
        f"the gradients of {len(names)} of {total} parameters were compared: those that the "
        "argument `parameters` selects",
    )
