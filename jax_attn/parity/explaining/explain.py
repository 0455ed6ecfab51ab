"""Explain a check that does not pass: the first wrong tensor of the port, and the reference's.

Every floating-point tensor that the reference computes in float64 is compared with every one that
the port computes, equation by equation. Tensors are paired by their numbers, not by names.
"""

import contextlib
from collections.abc import Collection, Iterator
from dataclasses import replace
from itertools import chain, count
from typing import Any, NamedTuple

from jax_attn.environment import free_memory
from jax_attn.parity.explaining.align import Aligner
from jax_attn.parity.explaining.allowance import MOST_RUNS, Allowance, SpentError
from jax_attn.parity.explaining.cause import Cause
from jax_attn.parity.explaining.causes import MOST_TRIALS, find_causes
from jax_attn.parity.explaining.explanation import Explanation, differs_on_the_mesh
from jax_attn.parity.explaining.region import Region
from jax_attn.parity.explaining.regions import births, find_regions
from jax_attn.parity.explaining.repro import repro
from jax_attn.parity.explaining.small_errors import small_errors
from jax_attn.parity.explaining.taps.tap import Tap
from jax_attn.parity.explaining.taps.torch_taps import torch_taps
from jax_attn.parity.explaining.wanted import (
    cotangents_of,
    floating,
    have_gradients,
    tapped,
    told,
    wrong_results,
)
from jax_attn.parity.judge.compare import Verdict
from jax_attn.parity.judge.result import Result
from jax_attn.parity.run.port import Port, full_precision
from jax_attn.parity.run.reference import Reference
from jax_attn.progress import counting
from jax_attn.transfer import Layout


def explain_result(
    result: Result, reference: Reference, port: Port, layout: Layout | None
) -> Explanation:
    """Find where the port of a check first differs from its reference, and what would explain it.

    result: the result of the check.
    """
    if result.verdict is Verdict.PASS or differs_on_the_mesh(result):
        return Explanation(result, ())
    outputs = floating(reference.outputs(result.dtype))
    wanted = wrong_results(result, outputs, port, layout)
    found = regions_of(reference, port, wanted, result.dtype) if wanted else Ended(())
    reference.expect_unwritten()
    return Explanation(result, found.regions, stopped=found.stopped)


class Ended(NamedTuple):
    """The regions that a search has found. stopped: why it ended early, or ""."""

    regions: tuple[Region, ...]
    stopped: str = ""


def regions_of(reference: Reference, port: Port, wanted: Collection[str], dtype: str) -> Ended:
    """Find the regions that make any of `wanted` wrong, each with its possible causes.

    An interruption, or the end of the work allowed, leaves those found.

    wanted: wrong outputs of the port ("output …"), or wrong gradients ("parameter …", "input …").
    """
    places: dict[int, list[Region]] = {}
    allowance, stopped = Allowance(), ""
    try:
        for place, regions in _places(reference, port, wanted, dtype, allowance):
            places[place] = regions
    except KeyboardInterrupt:
        stopped = "interrupted"
    if allowance.is_spent:
        stopped = stopped or f"after {MOST_RUNS:,} runs of the port"
    found: dict[Any, Region] = {}
    for region in chain.from_iterable(places.values()):
        found.setdefault(told(region), region)
    return Ended(tuple(found.values()), stopped)


def _places(
    reference: Reference, port: Port, wanted: Collection[str], dtype: str, allowance: Allowance
) -> Iterator[tuple[int, list[Region]]]:
    """Yield each wrong place and its regions: when it is found, and again with their causes.

    If the allowance is spent, the causes of what was found by then are tried all the same.
    """
    outputs = floating(reference.outputs(dtype))
    cotangents = cotangents_of(outputs, dtype) if have_gradients(wanted) else {}
    taps = torch_taps(reference, dtype, cotangents, free_memory())
    places: list[tuple[Region, list[Region]]] = []
    with port.on_mesh(), full_precision(), counting("runs of the port", MOST_RUNS) as show:
        program = tapped(port, dtype, cotangents)
        results, of_run = taps.without_steps, taps.run.kinds["output"]
        aligner = Aligner(results.taps, results.spreads, of_run)
        finer = Aligner(taps.with_halves.taps, taps.with_halves.spreads, of_run)
        allowance.show = show

        def narrower(region: Region) -> list[Region]:
            def index(tap: Tap) -> int:
                return taps.results[tap.index]

            try:
                return list(births(region, program, finer, wanted, index, allowance))
            except SpentError:
                return [region]

        with contextlib.suppress(SpentError):
            for found in find_regions(program, aligner, wanted, allowance):
                before = found.whole.replaced
                run = program.run(before) if before else program.base
                whole, *parts = (
                    replace(region, repro=repro(region, run, results))
                    for region in (found.whole, *found.parts)
                )
                yield len(places), parts
                places.append((whole, parts))
        if not places and not allowance.is_spent:
            yield 0, list(small_errors(program, aligner, results.tape, wanted))
        finest = [[narrower(part) for part in parts] for _, parts in places]
    with counting("causes", MOST_TRIALS * sum(1 + len(parts) for _, parts in places)) as show:
        done = count(1)

        def causes_of(region: Region) -> tuple[Cause, ...]:
            return find_causes(results.tape, aligner, region, lambda: show(next(done)))

        for n, (whole, parts) in enumerate(places):
            causes = list(map(causes_of, parts))
            is_split = len(parts) > 1 or not any(cause.confirmed for cause in causes[0])
            together = [cause for cause in causes_of(whole) if cause.confirmed] if is_split else []
            if together:
                yield n, [replace(whole, causes=tuple(together), tried=True)]
                continue
            yield (
                n,
                [
                    replace(part, causes=of_part, tried=True, repro=of.repro)
                    for of, each, of_part in zip(parts, finest[n], causes, strict=True)
                    for part in each
                ],
            )
