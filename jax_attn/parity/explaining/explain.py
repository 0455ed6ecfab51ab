"""Explain a check that does not pass: the first wrong tensor of the port, and the reference's.

Every floating-point tensor that the reference computes in float64 is compared with every one that
the port computes, equation by equation. Tensors are paired by their numbers: no name is asked for.
"""

import time
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn.environment import free_memory
from jax_attn.parity.explaining.align import Aligner
from jax_attn.parity.explaining.causes import find_causes
from jax_attn.parity.explaining.explanation import Explanation
from jax_attn.parity.explaining.jax_taps import Program
from jax_attn.parity.explaining.regions import Region, find_regions
from jax_attn.parity.explaining.torch_taps import torch_taps
from jax_attn.parity.judge.compare import Verdict
from jax_attn.parity.judge.result import Result
from jax_attn.parity.run.port import Port, float_dtype, forward_and_gradients, full_precision
from jax_attn.parity.run.reference import Reference
from jax_attn.transfer import Layout, flatten

_SECONDS = 30.0
"""For how long causes are tried, of all regions together."""


def explain_result(
    result: Result, reference: Reference, port: Port, layout: Layout | None
) -> Explanation:
    """Where the port of a check first differs from its reference, and what would explain it.

    result: the check's.
    """
    if result.verdict is Verdict.PASS:
        return Explanation(result, ())
    return Explanation(result, _Sides(reference, port, layout, result.dtype).regions(result))


def _told(region: Region) -> Any:
    """What of a region is told once: its cause, as of queries and keys; else its wrong numbers."""
    wrong = region.first_wrong
    confirmed = tuple(cause.sentence for cause in region.causes if cause.confirmed)
    return confirmed or (wrong.theirs.index, wrong.ours.value.tobytes())


class _Sides:
    """Both sides of a check, as `explain` runs them."""

    def __init__(self, reference: Reference, port: Port, layout: Layout | None, dtype: str):
        self._reference, self._port = reference, port
        self._layout, self._dtype = layout, dtype

    def regions(self, result: Result) -> tuple[Region, ...]:
        """Those of the wrong outputs; where all are right, those of the wrong gradients."""
        failed = [t for t in result.tensors if t.verdict is not Verdict.PASS]
        outputs = {f"output {t.name}" for t in failed if t.kind == "output"}
        outputs &= {f"output {name}" for name in self._reference.outputs(self._dtype)}
        if outputs:
            return self._found(outputs, has_gradients=False)
        inputs = {f"input {t.name}" for t in failed if t.kind == "gradient of input"}
        names = {t.name for t in failed if t.kind == "gradient of parameter"}
        gradients = inputs | {f"parameter {path}" for path in self._paths(names)}
        return self._found(gradients, has_gradients=True) if gradients else ()

    def _found(self, wanted: Collection[str], *, has_gradients: bool) -> tuple[Region, ...]:
        outputs = self._reference.outputs(self._dtype)
        rng, dtype = np.random.default_rng(0), float_dtype(self._dtype)
        cotangents = {
            name: rng.standard_normal(a.shape).astype(dtype)
            for name, a in (outputs if has_gradients else {}).items()
        }
        taps = torch_taps(self._reference, self._dtype, cotangents, free_memory())
        forward, *args = self._port.bind()

        def named(params: Any, floats: Any, others: Any, cotangents: Any) -> dict[str, jax.Array]:
            (outputs, _), grads = forward_and_gradients(forward, params, floats, others, cotangents)
            arrays = {f"output {name}": a for name, a in outputs.items()}
            if grads is not None:
                of_params, of_inputs = grads
                arrays |= {f"parameter {path}": a for path, a in flatten(of_params).items()}
                arrays |= {f"input {name}": a for name, a in of_inputs.items()}
            return arrays

        with full_precision():
            on_device = {name: jnp.array(a) for name, a in cotangents.items()}
            program = Program(named, *args, on_device)
            aligner = Aligner(taps.taps, taps.spreads)
            regions = tuple(find_regions(program, aligner, wanted))
        until = time.monotonic() + _SECONDS
        explained = [
            replace(region, causes=find_causes(self._reference, cotangents, aligner, region, until))
            for region in regions
        ]
        return tuple({_told(region): region for region in reversed(explained)}.values())[::-1]

    def _paths(self, names: Collection[str]) -> set[str]:
        """The port's parameters whose gradients make up those of the reference's in `names`."""
        if self._layout is None or not names:
            return set()
        arrays = flatten(self._port.module)
        numbered = {
            path: np.full(a.shape, n, np.float64) for n, (path, a) in enumerate(arrays.items())
        }
        made_of = self._layout.to_torch(numbered)
        paths = list(arrays)
        return {paths[int(n)] for name in names for n in np.unique(made_of[name])}
