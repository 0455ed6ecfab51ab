"""Explain a port by its reference's tensors, captured where torch is: places, without causes."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from jax_attn.parity.explaining.align import Aligner
from jax_attn.parity.explaining.allowance import MOST_RUNS, Allowance, SpentError
from jax_attn.parity.explaining.explanation import Explanation, differs_on_the_mesh
from jax_attn.parity.explaining.region import Region
from jax_attn.parity.explaining.regions import find_regions
from jax_attn.parity.explaining.taps.tap import Place, Tap
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
from jax_attn.parity.run.inputs_and_runs import Arrays
from jax_attn.parity.run.port import Port, full_precision
from jax_attn.progress import counting
from jax_attn.transfer import Layout

Captured = Mapping[str, Any]
"""Taps as plain data: a sequence for each field of a tap, their spreads, and the run's outputs."""


def captured(taps: Sequence[Tap], spreads: Sequence[np.ndarray], outputs: Arrays) -> Captured:
    """Return taps of a reference as plain data. outputs: those of the run, by name."""
    return {
        "op": tuple(tap.op for tap in taps),
        "place": tuple(tuple(tap.place) for tap in taps),
        "value": tuple(tap.value for tap in taps),
        "parents": tuple(tap.parents for tap in taps),
        "spread": tuple(spread.astype(np.float32) for spread in spreads),
        "outputs": dict(outputs),
    }


def _taps(held: Captured, *, is_forward: bool) -> tuple[list[Tap], list[np.ndarray]]:
    """Return the taps, only those of the forward pass if `is_forward`, and their spreads."""
    names = ("op", "place", "value", "parents", "spread")
    taps: list[Tap] = []
    spreads: list[np.ndarray] = []
    for op, place, value, parents, spread in zip(*(held[name] for name in names), strict=True):
        if not (is_forward and Place(*place).is_backward):  # which comes last
            taps.append(Tap(len(taps), op, Place(*place), value, tuple(parents)))
            spreads.append(spread.astype(np.float64))
    return taps, spreads


def explain_by_captured(
    result: Result, held: Captured, outputs: Arrays, port: Port, layout: Layout | None
) -> Explanation:
    """Find where a port first differs from its reference, by the reference's captured tensors.

    outputs: the reference's outputs, in the order in which they were captured.
    """
    if result.verdict is Verdict.PASS or differs_on_the_mesh(result):
        return Explanation(result, ())
    outputs = floating(outputs)
    if not (wanted := wrong_results(result, outputs, port, layout)):
        return Explanation(result, ())
    dtype, of_gradients = result.dtype, have_gradients(wanted)
    taps, spreads = _taps(held, is_forward=not of_gradients)
    aligner = Aligner(taps, spreads, held["outputs"])
    cotangents = cotangents_of(outputs, dtype) if of_gradients else {}
    found: dict[Any, Region] = {}
    allowance, stopped = Allowance(), ""
    with port.on_mesh(), full_precision(), counting("runs of the port", MOST_RUNS) as show:
        allowance.show = show
        try:
            with suppress(SpentError):
                program = tapped(port, dtype, cotangents)
                for place in find_regions(program, aligner, wanted, allowance):
                    for part in place.parts:
                        found.setdefault(told(part), part)
        except KeyboardInterrupt:
            stopped = "interrupted"
    if allowance.is_spent:
        stopped = stopped or f"after {MOST_RUNS:,} runs of the port"
    return Explanation(result, tuple(found.values()), stopped=stopped)
