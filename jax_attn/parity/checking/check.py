"""Check a port against its reference: any torch module, any NNX module.

A verdict flows in one direction: inputs -> runs of both sides and the oracle, as arrays
under the same names -> budgets -> one report a tensor -> `Result`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import numpy as np
import torch
from flax import nnx

from jax_attn.dtypes import DTYPES
from jax_attn.parity.checking import canaries
from jax_attn.parity.judge.budget import Budget
from jax_attn.parity.judge.compare import TensorReport, Verdict, judge
from jax_attn.parity.judge.result import Result
from jax_attn.parity.run import TRANSFORMS
from jax_attn.parity.run import port as run_jax
from jax_attn.parity.run.inputs_and_runs import Inputs, Run, wide
from jax_attn.parity.run.port import Port
from jax_attn.parity.run.reference import Reference
from jax_attn.parity.run.torch_modes import TORCH_DTYPES
from jax_attn.transfer import Layout, TransferError, as_numpy

Arrays = Mapping[str, np.ndarray]


def check(
    reference: torch.nn.Module,
    port: nnx.Module,
    inputs: tuple[np.ndarray, ...] | Mapping[str, np.ndarray],
    *,
    layout: Layout | None = None,
    reference_call: Callable[..., Any] | None = None,
    port_call: Callable[..., Any] | None = None,
    dtype: str = "float32",
    gradients: bool = True,
    transforms: Sequence[str] = ("eager", "jit"),
    seed: int = 0,
) -> Result:
    """Whether `port` computes what `reference` does, within what rounding allows.

    reference, port: both with their weights in place and in `dtype`; copies are run, neither
        is changed. The check loads no weights: that would hide a bad transfer.
    inputs: NumPy arrays given to both sides, positional (a tuple) or by keyword (a dict);
        floating ones are rounded to `dtype`.
    layout: the transfer table between the two. With it the weights are compared first, bit for
        bit, and parameter gradients pair by it; without it the result says that neither was.
    reference_call, port_call: `(module, *args, **inputs) -> array | {name: array}`, where a
        side is called in its own way: masks, axis order, static arguments, several outputs.
    gradients: compare those of the floating inputs (and, with a layout, of the parameters)
        against one seeded cotangent for each output.
    seed: of the cotangents.
    transforms: how the port is run: some of eager, jit, grad, vmap, remat.

    The oracle is the reference in float64, narrowing casts refused; the budget is the spread of
    perturbed float64 runs (`jax_attn.parity.judge.budget`). The reference is run as it is, under
    grad and in inference mode, and held to the same budget. A bug that these inputs would not
    reveal makes the verdict INCONCLUSIVE, and is named with what would (`parity.canaries`).

    Raises TypeError or ValueError for arguments that cannot be checked, naming each.
    """
    _validate(reference, port, layout, dtype, transforms)
    given = Inputs.of(inputs, run_jax.float_dtype(dtype))
    called = Reference(reference, reference_call, given)
    if not called.repeats(dtype):
        raise ValueError(
            "reference: expected the same outputs each time, got others on the same inputs; is it "
            "in training mode, with dropout? call .eval() first"
        )
    prepared = Prepared(called, dtype, gradients=gradients, seed=seed)
    weights = () if layout is None else compare_weights(reference, port, layout)
    # A table that does not fit is a failure already; there is nothing to pair gradients by.
    paired = layout is not None and _pairs_parameters(reference, port, layout)
    notes = ()
    if layout is None:
        notes = ("weights and parameter gradients were not compared: no layout",)
    elif not paired:
        notes = ("parameter gradients were not compared: the table does not pair them",)
    doubts, not_tried = canaries.tried(prepared)
    return prepared.judge(
        Port(port, port_call, given),
        transforms,
        to_torch=layout.to_torch if paired else None,
        failures=weights,
        doubts=doubts,
        notes=(*notes, *not_tried),
    )


@dataclass(frozen=True)
class Prepared:
    """The reference's side of a check: everything that does not depend on the port.

    oracle: cotangents -> `Run` in float64; None: the reference itself in float64.
    precision: the budget's, where it is not `dtype`'s own (a matrix unit that rounds).
    declared_nan: output name -> where the reference gives NaN, as published, and the oracle
        does not. There the oracle alone judges; so it does for every gradient, since one NaN
        reaches them all.
    """

    reference: Reference
    dtype: str
    gradients: bool = True
    seed: int = 0
    oracle: Callable[[Arrays], Run] | None = None
    precision: str | None = None
    declared_nan: Arrays = field(default_factory=dict)

    @cached_property
    def inference(self) -> dict[str, np.ndarray]:
        """The reference's outputs in inference mode, where torch may take a faster path."""
        return self.reference.outputs(self.dtype)

    @cached_property
    def cotangents(self) -> dict[str, np.ndarray]:
        """One for each output, standard normal, rounded to `dtype`."""
        rng = np.random.default_rng([self.seed, 1])
        dtype = run_jax.float_dtype(self.dtype)
        return {
            name: rng.standard_normal(a.shape).astype(dtype) for name, a in self.inference.items()
        }

    @cached_property
    def own(self) -> Run:
        """What the reference gives in `dtype`."""
        return self.reference.run(self.dtype, self.cotangents if self.gradients else {})

    @cached_property
    def exact(self) -> Run:
        """What the oracle gives."""
        run = self.oracle or self.reference.exact
        found = run(wide(self.cotangents))
        return found if self.gradients else Run(found.outputs, {}, {})

    @cached_property
    def budgets(self) -> dict[str, dict[str, Budget]]:
        cotangents = self.cotangents if self.gradients else {}
        return self.reference.spread(self.precision or self.dtype, cotangents)

    @cached_property
    def reference_failures(self) -> tuple[str, ...]:
        """What is wrong with the reference before any port is looked at."""
        failures = []
        for name, where in self.declared_nan.items():
            got = np.isnan(wide(self.own.outputs)[name])
            if not np.array_equal(got, where):
                failures.append(
                    f"declared difference: reference {name} should be NaN at {int(where.sum())} "
                    f"elements, as published, and is at {int(got.sum())}"
                )
        for name, got in wide(self.inference).items():
            if name in self.declared_nan:
                got = np.where(self.declared_nan[name], self.exact.kinds["output"][name], got)
            report = self.judge_one("output", name, "inference", got)
            if report.verdict is Verdict.FAIL:
                failures += [
                    f"the reference in inference mode: {name}: {reason}"
                    for reason in report.reasons
                ]
        return tuple(failures)

    def judge_one(self, kind: str, name: str, transform: str, got: np.ndarray) -> TensorReport:
        """The verdict on one tensor of float64 numbers."""
        own = self.own.kinds[kind][name]
        want = self.exact.kinds[kind][name]
        if self.declared_nan:
            where = self.declared_nan.get(name) if kind == "output" else None
            own = np.where(where, want, own) if where is not None else None
        budget = self.budgets[kind][name]
        return judge(want, got, own, budget, kind=kind, name=name, transform=transform)

    def compare(self, run: Run, transform: str) -> Iterator[TensorReport]:
        """One report for each tensor of `run`, in the reference's names.

        Tensors without a counterpart in `run` are left out only where they are parameter
        gradients and none is given: there was no table to pair them by.
        """
        for kind, tensors in self.exact.kinds.items():
            got = run.kinds[kind]
            if kind == "gradient of parameter" and not got:
                continue
            if got.keys() != tensors.keys():
                raise ValueError(
                    f"{kind}: the reference has {sorted(tensors)}, the port {sorted(got)}"
                )
            yield from (self.judge_one(kind, name, transform, got[name]) for name in tensors)
            if kind == "output" and any(got[name].shape != tensors[name].shape for name in tensors):
                return  # a failure already, and no cotangent fits

    def judge(
        self,
        port: Port,
        transforms: Sequence[str],
        *,
        to_torch: Callable[[Arrays], Arrays] | None,
        failures: Sequence[str] = (),
        doubts: Sequence[str] = (),
        notes: Sequence[str] = (),
        **identity: Any,
    ) -> Result:
        """Run the port under each transform and compare it, tensor by tensor."""
        chosen = jax.config.jax_default_device
        backend = chosen.platform if chosen is not None else jax.default_backend()
        pinned = backend != "cpu" and self.precision is None
        reports: list[TensorReport] = []
        with jax.default_matmul_precision("highest" if pinned else None):
            for transform in transforms:
                cotangents = self.cotangents if self.gradients else {}
                run = port.run(self.dtype, cotangents, transform)
                in_torch_names = to_torch(run.parameter_grads) if to_torch else {}
                run = Run(run.outputs, run.input_grads, in_torch_names if self.gradients else {})
                reports += self.compare(run, transform)
        if pinned:
            notes = (*notes, 'matmul precision pinned to "highest"')
        if not self.gradients:
            notes = (*notes, "gradients were not compared: gradients=False")
        if reports and all(r.verdict is Verdict.PASS and r.is_zero for r in reports):
            doubts = (*doubts, "every compared tensor is zero: other weights would give the same")
        return Result(
            dtype=self.dtype,
            backend=identity.pop("backend", backend),
            tensors=tuple(reports),
            failures=(*failures, *self.reference_failures),
            doubts=tuple(doubts),
            notes=tuple(notes),
            **identity,
        )


def _pairs_parameters(reference: torch.nn.Module, port: nnx.Module, layout: Layout) -> bool:
    try:
        names = layout.to_torch(run_jax.parameters(port)).keys()
    except TransferError:
        return False
    return names == {name for name, _ in reference.named_parameters()}


def compare_weights(
    reference: torch.nn.Module, port: nnx.Module, layout: Layout
) -> tuple[str, ...]:
    """Every weight of the two sides that is not the same, bit for bit, through the table."""
    theirs = {name: as_numpy(tensor) for name, tensor in reference.state_dict().items()}
    try:
        ours = layout.to_torch(run_jax.parameters(port))
    except TransferError as error:
        return tuple(f"weights: {problem}" for problem in error.problems)
    failures = [
        f"weights: the reference's parameter {name!r} is not in the table"
        for name, _ in reference.named_parameters()
        if name not in ours
    ]
    own = {name for name, _ in reference.named_parameters()}
    failures += [
        f"weights: the reference ties {name!r} to another parameter, the table does not"
        for name in ours
        if name in theirs and name not in own and name not in dict(reference.named_buffers())
    ]
    for name, got in ours.items():
        if name not in theirs:
            failures.append(f"weights: the table gives {name!r}, which the reference lacks")
            continue
        want = theirs[name]
        if (got.dtype, got.shape) != (want.dtype, want.shape):
            failures.append(
                f"weights: {name!r} is {want.dtype}{list(want.shape)} in the reference, "
                f"{got.dtype}{list(got.shape)} in the port"
            )
        elif got.tobytes() != want.tobytes():
            differ = int((got != want).sum())
            failures.append(
                f"weights: {name!r} differs in {differ} of {got.size} elements; its row is "
                f"{layout.row_of(name)}"
            )
    return tuple(failures)


def _validate(reference, port, layout, dtype, transforms) -> None:
    """Every reason why these cannot be checked, at once."""
    problems = []
    for name, value, kind in (
        ("reference", reference, torch.nn.Module),
        ("port", port, nnx.Module),
        *([("layout", layout, Layout)] if layout is not None else []),
    ):
        if not isinstance(value, kind):
            problems.append(f"{name}: expected a {kind.__name__}, got {type(value).__name__}")
    if problems:
        raise TypeError("\n".join(problems))
    if dtype not in DTYPES:
        problems.append(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    if isinstance(transforms, str) or not transforms or set(transforms) - set(TRANSFORMS):
        known = ", ".join(TRANSFORMS)
        problems.append(f"transforms: expected a tuple of some of {known}, got {transforms!r}")
    if dtype == "float64" and not jax.config.jax_enable_x64:
        problems.append(
            "dtype: float64 needs JAX's x64 mode, else it is narrowed silently; expected "
            'jax.config.update("jax_enable_x64", True) before the port is built, got x64 off'
        )
    problems += [
        f"reference parameter {name!r}: expected {dtype}, got {p.dtype}; convert the module first"
        for name, p in reference.named_parameters()
        if dtype in TORCH_DTYPES and p.is_floating_point() and p.dtype != TORCH_DTYPES[dtype]
    ]
    if problems:
        raise ValueError("\n".join(problems))
