"""Check one port on several inputs, such as those of other sizes, and join the results."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from jax_attn.parity.judge.compare import TensorReport, Verdict
from jax_attn.parity.judge.finding import BLIND, Finding
from jax_attn.parity.judge.result import Result
from jax_attn.parity.pair.pair import Given
from jax_attn.parity.run.inputs_and_runs import Inputs

One = TypeVar("One")
Made = TypeVar("Made")


def each_of(inputs: Given | list[Given] | None, dtype: np.dtype) -> list[Inputs]:
    """Return one or several inputs, their floating-point arrays rounded to `dtype`.

    Raises TypeError with every reason why they are invalid, or ValueError for an empty list.
    """
    if not isinstance(inputs, list):
        return [Inputs.of(inputs, dtype)]
    if not inputs:
        raise ValueError("inputs: expected at least one tuple or dict of arrays, got an empty list")
    return made_of_each(inputs, partial(Inputs.of, dtype=dtype))


def made_of_each(several: Sequence[One], make: Callable[[One], Made]) -> list[Made]:
    """Make something of each of several inputs.

    Raises TypeError with the reasons of each TypeError; a line on the inputs says on which.
    """
    made: list[Made] = []
    problems: list[str] = []
    for n, one in enumerate(several):
        try:
            made.append(make(one))
        except TypeError as error:
            lines = str(error).splitlines()
            problems += [re.sub(r"^inputs\b", f"inputs[{n}]", line) for line in lines]
    if problems:
        raise TypeError("\n".join(dict.fromkeys(problems)))
    return made


def join_results(results: Sequence[Result], names: Sequence[str] = ()) -> Result:
    """Join the results of one port on several inputs, in order.

    names: what tells the results apart, "" for nothing; `inputs[0]` and so on if left out.

    The transform of each tensor says on which inputs it was run. So does each finding, unless it
    holds on all of them. Where some inputs would not reveal a bug and others would, this is a note.
    The explanation is that of the first result that does not pass.
    """
    first, *others = results
    if not others:
        return first
    names = names or [f"inputs[{n}]" for n in range(len(results))]
    doubts, revealed = _by_what_others_reveal([result.doubts for result in results])
    wrong = next((result for result in results if result.verdict is not Verdict.PASS), first)

    def explain(_: Result) -> Any:
        return wrong.explain()

    return replace(
        first,
        tensors=tuple(_tensors(results, names)),
        failures=tuple(_findings([result.failures for result in results], names)),
        doubts=tuple(_findings(doubts, names)),
        notes=(
            *_findings(revealed, names),
            *_findings([result.notes for result in results], names),
        ),
        explainer=explain if wrong.explainer else None,
    )


def _tensors(results: Sequence[Result], names: Sequence[str]) -> Iterator[TensorReport]:
    for name, result in zip(names, results, strict=True):
        for tensor in result.tensors:
            yield replace(tensor, transform=", ".join(filter(None, (tensor.transform, name))))


def _by_what_others_reveal(
    of_each: Sequence[Sequence[Finding]],
) -> tuple[list[list[Finding]], list[list[Finding]]]:
    """Split the doubts on each inputs from those about bugs that some of the inputs reveal."""
    blind = [{each.kind for each in found if each.startswith(BLIND)} for found in of_each]
    everywhere = set.intersection(*blind)

    def is_revealed(found: Finding) -> bool:
        return found.startswith(BLIND) and found.kind not in everywhere

    doubts = [[each for each in found if not is_revealed(each)] for found in of_each]
    return doubts, [[each for each in found if is_revealed(each)] for found in of_each]


def _findings(of_each: Sequence[Sequence[Finding]], names: Sequence[str]) -> Iterator[Finding]:
    """Yield findings that hold on all inputs once, and the others with their inputs."""
    everywhere = [
        finding
        for finding in of_each[0]
        if all(_key(finding) in map(_key, found) for found in of_each)
    ]
    yield from everywhere
    common = {*map(_key, everywhere)}
    for name, found in zip(names, of_each, strict=True):
        own = (f for f in found if _key(f) not in common)
        yield from (f.after(f"{name}: ") if name else f for f in own)


def _key(finding: Finding) -> tuple[str, str]:
    return finding.kind, str(finding)
