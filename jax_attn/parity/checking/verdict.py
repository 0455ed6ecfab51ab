"""A port against its prepared reference: run it, compare it, make the result."""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from jax_attn.parity.checking.prepared import Prepared
from jax_attn.parity.checking.weights import ToTorch
from jax_attn.parity.judge.compare import TensorReport, Verdict
from jax_attn.parity.judge.result import Result
from jax_attn.parity.run.inputs_and_runs import Run
from jax_attn.parity.run.port import Port


def judge_port(
    prepared: Prepared,
    port: Port,
    transforms: Sequence[str],
    *,
    to_torch: ToTorch | None,
    failures: Sequence[str] = (),
    doubts: Sequence[str] = (),
    notes: Sequence[str] = (),
    backend: str | None = None,
    level: str = "measured",
    name: str = "check",
    details: Mapping[str, str] | None = None,
) -> Result:
    """Run the port under each transform and compare it, tensor by tensor.

    to_torch: None where no table pairs the parameters: their gradients are not compared.
    backend: what the result says; None: the platform of JAX's default device.
    """
    device = next(iter(jnp.zeros(()).devices()))
    pinned = device.platform != "cpu" and prepared.precision is None
    reports: list[TensorReport] = []
    with jax.default_matmul_precision("highest" if pinned else None):
        for transform in transforms:
            run = run_port(prepared, port, transform, to_torch)
            reports += prepared.compare(run, transform)
    if pinned:
        notes = (*notes, 'matmul precision pinned to "highest"')
    if not prepared.gradients:
        notes = (*notes, "gradients were not compared: gradients=False")
    if reports and all(r.verdict is Verdict.PASS and r.is_zero for r in reports):
        doubts = (*doubts, "every compared tensor is zero: other weights would give the same")
    return Result(
        dtype=prepared.dtype,
        backend=backend or device.platform,
        tensors=tuple(reports),
        failures=(*failures, *prepared.reference_failures),
        doubts=tuple(doubts),
        notes=tuple(notes),
        level=level,
        name=name,
        details=dict(details or {}),
    )


def run_port(prepared: Prepared, port: Port, transform: str, to_torch: ToTorch | None) -> Run:
    """The port's run in the reference's names."""
    run = port.run(prepared.dtype, prepared.differentiated, transform)
    parameter_grads = to_torch(run.parameter_grads) if to_torch else {}
    return Run(run.outputs, run.input_grads, parameter_grads)
