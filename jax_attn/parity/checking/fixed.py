"""Find which arguments ask for something else than a golden reference, where they are fixed."""

from collections.abc import Collection, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import numpy as np

from jax_attn.parity.checking.reference_side import ReferenceSide
from jax_attn.parity.run.inputs_and_runs import Inputs
from jax_attn.transfer.arrays import same_bits


class Problems(NamedTuple):
    """Reasons why arguments cannot be checked: wrong types, and wrong values of the right types."""

    types: list[str]
    values: list[str]


def expect_none(*parts: Problems) -> None:
    """Raise TypeError with every wrong type, or else ValueError with every wrong value."""
    if types := [line for part in parts for line in part.types]:
        raise TypeError("\n".join(types))
    if values := [line for part in parts for line in part.values]:
        raise ValueError("\n".join(values))


def fixed_problems(
    golden: ReferenceSide,
    inputs: Any,
    dtype: Any,
    gradients: Any,
    seed: Any,
    reference_call: Any,
    parameters: Any,
) -> Problems:
    """Return which arguments ask for something else than `golden`, where they are fixed.

    None stands for an argument that is left out.
    """
    every = golden.answer("weights").parameters
    names = None if parameters is None else chosen(every, parameters)
    held = frozenset(every) if golden.parameters is None else golden.parameters
    is_other = {
        "inputs": inputs is not None and not _are_same(inputs, golden),
        "dtype": dtype not in (None, golden.dtype),
        "gradients": gradients not in (None, golden.gradients),
        "seed": seed not in (None, golden.seed),
        "reference_call": reference_call is not None,
        "parameters": names not in (None, held),
    }
    own_and_got = {
        "inputs": ("", f"a list of {len(inputs)}" if isinstance(inputs, list) else "others"),
        "dtype": (f", {golden.dtype}", repr(dtype)),
        "gradients": (f", {golden.gradients}", gradients),
        "seed": (f", {golden.seed}", seed),
        "reference_call": ("", repr(reference_call)),
        "parameters": (f", {len(held)} of them", repr(parameters)),
    }
    values = [
        f"{name}: expected the golden reference's own{its}, got {got}; leave it out, or capture "
        "the reference again with it"
        for name, (its, got) in own_and_got.items()
        if is_other[name]
    ]
    return Problems([], values)


def _are_same(inputs: Any, golden: ReferenceSide) -> bool:
    if isinstance(inputs, list):
        return False  # several inputs, and a golden reference has one
    given = Inputs.of(inputs, np.dtype(golden.dtype))
    ours, theirs = given.by_name, golden.inputs.by_name
    same = ours.keys() == theirs.keys() and len(given.args) == len(golden.inputs.args)
    return same and all(same_bits(a, theirs[name]) for name, a in ours.items())


def chosen(names: Collection[str], patterns: str | Sequence[str]) -> frozenset[str]:
    """Return the names of a reference's parameters that match any of the `fnmatch` patterns.

    Raises TypeError if the patterns are not strings, and ValueError naming each that matches none.
    """
    listed = [patterns] if isinstance(patterns, str) else patterns
    is_list = isinstance(listed, list | tuple)
    if not is_list or not listed or not all(isinstance(pattern, str) for pattern in listed):
        expected = "a pattern of parameter names or a tuple of such patterns"
        raise TypeError(f"parameters: expected {expected}, got {patterns!r}")
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
