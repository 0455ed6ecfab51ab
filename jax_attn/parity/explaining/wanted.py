"""What of a failed check is to be explained, and the port's program in which it is searched for."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from jax_attn.parity.explaining.region import Region
from jax_attn.parity.explaining.taps.jax_taps import TappedProgram
from jax_attn.parity.judge.compare import TensorReport, Verdict
from jax_attn.parity.judge.result import Result
from jax_attn.parity.run.inputs_and_runs import Arrays, float_dtype, is_float
from jax_attn.parity.run.port import Port
from jax_attn.parity.run.transforms import forward_and_gradients
from jax_attn.transfer import Layout, flatten


def floating(outputs: Arrays) -> dict[str, np.ndarray]:
    """Return the outputs that have a gradient; integers and booleans are not explained."""
    return {name: a for name, a in outputs.items() if is_float(a.dtype)}


def wrong_results(result: Result, outputs: Arrays, port: Port, layout: Layout | None) -> set[str]:
    """Return the wrong outputs ("output …") or, if all are right, gradients ("parameter …").

    outputs: the reference's floating outputs.
    """
    failed = [t for t in result.tensors if t.verdict is not Verdict.PASS]
    wrong = {f"output {t.name}" for t in failed if t.kind == "output"}
    return wrong & {f"output {name}" for name in outputs} or _gradients(failed, port, layout)


def _gradients(failed: Iterable[TensorReport], port: Port, layout: Layout | None) -> set[str]:
    names = {t.name for t in failed if t.kind == "gradient of parameter"}
    return {f"input {t.name}" for t in failed if t.kind == "gradient of input"} | {
        f"parameter {path}" for path in _paths(port, layout, names)
    }


def _paths(port: Port, layout: Layout | None, names: Collection[str]) -> set[str]:
    """Return the port's parameters whose gradients make up the reference's gradients in `names`."""
    if layout is None or not names:
        return set()
    arrays = flatten(port.module)
    numbered = {path: np.full(a.shape, n, np.float64) for n, (path, a) in enumerate(arrays.items())}
    made_of = layout.to_torch(numbered)
    paths = list(arrays)
    return {paths[int(n)] for name in names for n in np.unique(made_of[name])}


def have_gradients(wanted: Iterable[str]) -> bool:
    """Return whether any of the wrong results is a gradient."""
    return not all(name.startswith("output ") for name in wanted)


def cotangents_of(outputs: Mapping[str, np.ndarray], dtype: str) -> dict[str, np.ndarray]:
    """Draw the cotangents of outputs for the runs whose tensors are compared, always the same."""
    rng = np.random.default_rng(0)
    return {
        name: rng.standard_normal(a.shape).astype(float_dtype(dtype)) for name, a in outputs.items()
    }


def tapped(port: Port, dtype: str, cotangents: Arrays) -> TappedProgram:
    """Return the port's program: outputs and, with cotangents, gradients, each by its name."""
    forward, args, on_device = port.called(dtype, cotangents)

    def named(params: Any, floats: Any, others: Any, cotangents: Any) -> dict[str, jax.Array]:
        (outputs, _), grads = forward_and_gradients(forward, params, floats, others, cotangents)
        arrays = {f"output {name}": a for name, a in outputs.items()}
        if grads is not None:
            of_params, of_inputs = grads
            arrays |= {f"parameter {path}": a for path, a in flatten(of_params).items()}
            arrays |= {f"input {name}": a for name, a in of_inputs.items()}
        return arrays

    return TappedProgram(named, *args, on_device)


def told(region: Region) -> Any:
    """Return a key by which equal regions are reported once: the cause, else the wrong numbers."""
    wrong = region.first_wrong
    confirmed = tuple(cause.sentence for cause in region.causes if cause.confirmed)
    return confirmed or (wrong.theirs.index, wrong.ours.value.tobytes())
