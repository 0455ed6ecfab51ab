"""Explain a check that does not pass: the first wrong tensor of the port, and the reference's.

Every floating-point tensor that the reference computes in float64 is compared with every one that
the port computes, equation by equation. Tensors are paired by their numbers, not by names.
"""

import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jax_attn.environment import free_memory
from jax_attn.parity.explaining.align import Aligner
from jax_attn.parity.explaining.cause import Cause
from jax_attn.parity.explaining.causes import find_causes
from jax_attn.parity.explaining.explanation import Explanation, differs_on_the_mesh
from jax_attn.parity.explaining.region import Region
from jax_attn.parity.explaining.regions import births, find_regions
from jax_attn.parity.explaining.repro import repro
from jax_attn.parity.explaining.taps.jax_taps import TappedProgram
from jax_attn.parity.explaining.taps.torch_taps import torch_taps
from jax_attn.parity.judge.compare import TensorReport, Verdict
from jax_attn.parity.judge.result import Result
from jax_attn.parity.run.inputs_and_runs import float_dtype, is_float
from jax_attn.parity.run.port import Port, full_precision
from jax_attn.parity.run.reference import Reference
from jax_attn.parity.run.transforms import forward_and_gradients
from jax_attn.transfer import Layout, flatten

_SECONDS = 30.0
"""Time limit for trying causes, for all regions together."""


def explain_result(
    result: Result, reference: Reference, port: Port, layout: Layout | None
) -> Explanation:
    """Find where the port of a check first differs from its reference, and what would explain it.

    result: the result of the check.
    """
    if result.verdict is Verdict.PASS or differs_on_the_mesh(result):
        return Explanation(result, ())
    wanted = _wrong_outputs(result, reference) or _wrong_gradients(result, port, layout)
    regions = regions_of(reference, port, wanted, result.dtype) if wanted else ()
    reference.expect_unwritten()
    return Explanation(result, regions)


def _wrong_outputs(result: Result, reference: Reference) -> set[str]:
    wrong = {f"output {t.name}" for t in _not_passed(result) if t.kind == "output"}
    return wrong & {f"output {name}" for name in _floating(reference, result.dtype)}


def _floating(reference: Reference, dtype: str) -> dict[str, np.ndarray]:
    """Return the outputs that have a gradient; integers and booleans are not explained."""
    outputs = reference.outputs(dtype)
    return {name: a for name, a in outputs.items() if is_float(a.dtype)}


def _wrong_gradients(result: Result, port: Port, layout: Layout | None) -> set[str]:
    failed = _not_passed(result)
    names = {t.name for t in failed if t.kind == "gradient of parameter"}
    return {f"input {t.name}" for t in failed if t.kind == "gradient of input"} | {
        f"parameter {path}" for path in _paths(port, layout, names)
    }


def _not_passed(result: Result) -> list[TensorReport]:
    return [t for t in result.tensors if t.verdict is not Verdict.PASS]


def _paths(port: Port, layout: Layout | None, names: Collection[str]) -> set[str]:
    """Return the port's parameters whose gradients make up the reference's gradients in `names`."""
    if layout is None or not names:
        return set()
    arrays = flatten(port.module)
    numbered = {path: np.full(a.shape, n, np.float64) for n, (path, a) in enumerate(arrays.items())}
    made_of = layout.to_torch(numbered)
    paths = list(arrays)
    return {paths[int(n)] for name in names for n in np.unique(made_of[name])}


def regions_of(
    reference: Reference, port: Port, wanted: Collection[str], dtype: str
) -> tuple[Region, ...]:
    """Find the regions that make any of `wanted` wrong, each with its possible causes.

    wanted: wrong outputs of the port ("output …"), or wrong gradients ("parameter …", "input …").
    """
    outputs = _floating(reference, dtype)
    rng = np.random.default_rng(0)
    has_gradients = not all(name.startswith("output ") for name in wanted)
    cotangents = {
        name: rng.standard_normal(a.shape).astype(float_dtype(dtype))
        for name, a in (outputs if has_gradients else {}).items()
    }
    taps = torch_taps(reference, dtype, cotangents, free_memory())

    def named(params: Any, floats: Any, others: Any, cotangents: Any) -> dict[str, jax.Array]:
        (outputs, _), grads = forward_and_gradients(forward, params, floats, others, cotangents)
        arrays = {f"output {name}": a for name, a in outputs.items()}
        if grads is not None:
            of_params, of_inputs = grads
            arrays |= {f"parameter {path}": a for path, a in flatten(of_params).items()}
            arrays |= {f"input {name}": a for name, a in of_inputs.items()}
        return arrays

    with port.on_mesh(), full_precision():
        forward, args, on_device = port.called(dtype, cotangents)
        program = TappedProgram(named, *args, on_device)
        results, of_run = taps.without_steps, taps.run.kinds["output"]
        aligner = Aligner(results.taps, results.spreads, of_run)
        finer = Aligner(taps.with_halves.taps, taps.with_halves.spreads, of_run)
        regions = tuple(find_regions(program, aligner, wanted))
        narrower = [
            tuple(births(region, program, finer, wanted, lambda tap: taps.results[tap.index]))
            for region in regions
        ]
        scripts = [repro(region, program.run(region.replaced), results) for region in regions]
    until = time.monotonic() + _SECONDS
    told: dict[Any, Region] = {}
    for region, parts, script in zip(regions, narrower, scripts, strict=True):
        causes = find_causes(reference, cotangents, aligner, region, until)
        for part in parts:
            told.setdefault(_told(part, causes), replace(part, causes=causes, repro=script))
    return tuple(told.values())


def _told(region: Region, causes: Sequence[Cause]) -> Any:
    """Return a key by which equal regions are reported once: the cause, else the wrong numbers."""
    wrong = region.first_wrong
    confirmed = tuple(cause.sentence for cause in causes if cause.confirmed)
    return confirmed or (wrong.theirs.index, wrong.ours.value.tobytes())
