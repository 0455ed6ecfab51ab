"""Judge a row of `jax-attn verify --mesh`: a design sharded along batch and heads.

Besides its numbers, a row's traffic is compared with theory. If a layer's heads are sharded, its
output is a sum over them, and so is the gradient of each input, once for each projection that reads
it. The gradient of each parameter is a sum over the parts of the batch. Nothing else is sent, and
each device holds as large a part of every gradient as of its parameter or input. Temporaries are
sharded along at least one axis of the mesh, so that a device holds at most that part of what one
device would hold, plus what is sent.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, PartitionSpec

from jax_attn.attention import ArgumentError
from jax_attn.parity.checking.on_mesh import replicated, told
from jax_attn.parity.checking.probes import nothing_cut
from jax_attn.parity.judge.budget import PRECISIONS, Budget
from jax_attn.parity.judge.compare import TensorReport, judge, rms
from jax_attn.parity.judge.finding import Finding, findings
from jax_attn.parity.judge.result import NotRun, Result
from jax_attn.parity.run.inputs_and_runs import RaisedError, float_dtype, wide
from jax_attn.parity.run.placement import MeshPlacement, unlike_copies
from jax_attn.parity.run.port import Port, full_precision, x64_for
from jax_attn.parity.run.traffic import Sent, sent, total
from jax_attn.parity.run.transforms import Forward, Tree
from jax_attn.selfcheck.matrix.cached_calls import port_ragged, times_and_tokens
from jax_attn.selfcheck.matrix.designs import PORTED_DESIGNS
from jax_attn.selfcheck.matrix.kernels import kernel_of_rows
from jax_attn.selfcheck.matrix.mesh_rows import DATA, HEADS, MeshCase
from jax_attn.selfcheck.matrix.preparation import Preparation
from jax_attn.selfcheck.matrix.run_rows import Doubts, judge_case, refusal
from jax_attn.transfer import flatten
from jax_attn.transfer.nnx.variables import spelled

_BY_HEAD = ("allowed", "bias", "keep")
"""Masks that may have an axis of heads, (B, N or 1, T, S). The first axis of every input is B."""
_DECISION = 4
"""Bytes: a `lax.cond` on a property of all rows needs a sum of one number over them."""
_RATE = 2.0**-4
"""The learning rate of the step of gradient descent; a power of two adds no rounding."""


def run_on_mesh(
    rows: Sequence[MeshCase], backend: str, implementation: str | None, *, doubts: Doubts
) -> list[Result | NotRun]:
    """Judge rows of one preparation; `doubts` is as for `run_cases`.

    implementation: the kernel that the ports insist on. None means blocked if the port has no
    cache, since no partitioner could shard its loops by itself.
    """
    first = rows[0].case
    if implementation is None and not PORTED_DESIGNS[first.design].cached:
        implementation = "blocked"
    with x64_for(first.dtype), jax.default_device(jax.devices(backend)[0]):
        kernel = kernel_of_rows(implementation, backend, first.shape)
        preparation = Preparation(PORTED_DESIGNS[first.design], first, kernel=kernel)
        if why := preparation.refused(first.transform):
            return [replace(refusal(r.case, backend, why), design=r.name) for r in rows]
        doubted = tuple(doubts(preparation))
        return [_judged(preparation, row, backend, doubted) for row in rows]


def _judged(
    preparation: Preparation, row: MeshCase, backend: str, doubts: Sequence[str]
) -> Result | NotRun:
    on = OnMesh(preparation, row.mesh(backend))
    try:
        result = judge_case(preparation, row.case, doubts, port=on.port, backend=backend)
    except RaisedError as error:
        if not isinstance(error.__cause__, ArgumentError):
            raise
        why = " ".join(str(error.__cause__).split())
        return replace(refusal(row.case, backend, why), design=row.name)
    with full_precision(preparation.precision is None):
        failures, notes = on.findings()
        reports, of_step = on.after_a_step()
    return replace(
        result,
        name=row.name,
        tensors=(*result.tensors, *reports),
        failures=(*result.failures, *failures, *of_step),
        notes=(*notes, *result.notes),
        details={**result.details, "mesh": on.placement.words},
    )


@dataclass(frozen=True)
class OnMesh:
    """A row's preparation on a mesh of the axes `data` and `heads`."""

    preparation: Preparation
    mesh: Mesh

    @cached_property
    def placement(self) -> MeshPlacement:
        """The placement: inputs sharded along the batch, parameters as `sharding` shards them."""
        inputs = self.preparation.inputs
        of_inputs = {name: _spec(name, array) for name, array in inputs.items()}
        return MeshPlacement(self.mesh, of_inputs, self._parameters)

    @cached_property
    def port(self) -> Port:
        return replace(self.preparation.port, placement=self.placement)

    @cached_property
    def _parameters(self) -> dict[str, PartitionSpec]:
        design, case = self.preparation.design, self.preparation.case

        def build() -> nnx.Module:
            return design.port(case.size, case.dtype, nnx.Rngs(0), sharding={"heads": HEADS})

        with jax.set_mesh(self.mesh):
            specs = nnx.get_partition_spec(nnx.state(nnx.eval_shape(build), nnx.Param))
        leaves = nnx.to_flat_state(specs)
        return {spelled(path): leaf.get_value() or PartitionSpec() for path, leaf in leaves}

    # --- traffic and memory ---

    def findings(self) -> tuple[tuple[Finding, ...], tuple[Finding, ...]]:
        """Return (failures, notes) about what the port's programs send and hold."""
        prepared = self.preparation.prepared
        single = self.port.on_one_device()
        assert single is not None
        programs, of_one = (
            port.programs(prepared.dtype, prepared.differentiated) for port in (self.port, single)
        )
        failures: list[Finding] = [*nothing_cut(self.port), *replicated(self.port, programs)]
        for (name, program), most in zip(programs.items(), self.most_added(), strict=True):
            operations = sent(program.as_text() or "")
            beyond = _beyond(name, operations, most, self._most_gathered(name))
            failures += findings("mesh-costs", beyond)
            held, most_held = _temporaries(program), self._most_held(of_one[name], operations)
            if held > most_held:
                expected = f"expected temporaries of at most {most_held} bytes on each device"
                failures.append(Finding("mesh-costs", f"{name}: {expected}, got {held}"))
        return tuple(failures), tuple(told(self.port, programs))

    def most_added(self) -> tuple[int, int]:
        """Return the bytes of sums on each device, in theory: in the forward and in both passes."""
        preparation, size = self.preparation, self.preparation.case.size
        design, (data, heads) = preparation.design, (self.mesh.shape[n] for n in (DATA, HEADS))
        calls, T = 1, size.T
        if design.cached:  # each piece has its own sums
            ragged = design.port_call is port_ragged
            calls, T = times_and_tokens(size.B, size.T, ragged=ragged)
        B, lengths = size.B // data, {"key": size.S, "value": size.S}
        projected = dict(zip("qkv", design.inputs * (3 // len(design.inputs)), strict=True))
        read = {
            letter: B * lengths.get(name, T) * self._features(name)
            for letter, name in projected.items()
        }
        module = flatten(preparation.pair.port)
        added = {path: self._added(path, a.shape) for path, a in module.items()}
        K = design.key_heads(size)
        for letter in "kv":
            of_heads = [a for path, a in module.items() if path.endswith(f"{letter}_proj.kernel")]
            if K % heads:  # several devices read the same heads: their gradients are summed first
                read[letter] += B * lengths.get(projected[letter], T) * K * of_heads[0].shape[-1]
        output, backward = B * T * size.D, calls * sum(added.values())
        if heads > 1:
            backward += sum(read.values())
        if "weights" in preparation.prepared.cotangents:  # these repeat the projections
            again = [n for p, n in added.items() if not p.startswith(("v_proj", "out_proj"))]
            backward += sum(again) + (read["q"] + read["k"] if heads > 1 else 0)
            output += design.heads_average * B * T * size.S
        itemsize = float_dtype(preparation.case.dtype).itemsize
        forward = output if heads > 1 else 0
        return forward * itemsize, (forward + backward) * itemsize

    def _most_gathered(self, name: str) -> int:
        """Return the most bytes of gathered arrays: gradients of keys' and values' parameters.

        These are gathered if Auto axes shard them by heads that several devices read, while each
        device has all of the parameters.
        """
        design, case = self.preparation.design, self.preparation.case
        is_auto = AxisType.Auto in self.mesh.axis_types
        alike = design.key_heads(case.size) % self.mesh.shape[HEADS] != 0
        if name == "forward" or not (is_auto and alike):
            return 0
        module = flatten(self.preparation.pair.port)
        of_keys = [a for path, a in module.items() if "k_proj" in path or "v_proj" in path]
        return sum(a.size for a in of_keys) * float_dtype(case.dtype).itemsize

    def _most_held(self, of_one: jax.stages.Compiled, operations: list[Sent]) -> int:
        """Return the most bytes of temporaries on each device.

        Activations are sharded at least along the batch, and arrays as large as a parameter along
        the heads, so the size of the smaller axis divides both.
        """
        parts = min(self.mesh.shape.values())
        return _temporaries(of_one) // parts + total(operations)

    def _features(self, name: str) -> int:
        array = self.preparation.inputs[name]
        return array.shape[2] if array.ndim == 3 else self.preparation.case.size.D

    def _added(self, path: str, shape: tuple[int, ...]) -> int:
        """Return how many numbers of a parameter's gradient each device sums.

        It sums over the batch, and over the heads if every device has all of the parameter.
        """
        is_cut = any(self._parameters[path])
        parts = self.mesh.shape[HEADS] if is_cut else 1
        times = (self.mesh.shape[DATA] > 1) + (self.mesh.shape[HEADS] > 1 and not is_cut)
        return math.prod(shape) // parts * times

    # --- one step of training ---

    def after_a_step(self) -> tuple[list[TensorReport], list[Finding]]:
        """Judge each parameter after a step of gradient descent, and report wrong placements."""
        prepared, to_torch = self.preparation.prepared, self.preparation.design.layout.to_torch
        before, after = self.port.after(_step, prepared.dtype, prepared.cotangents)
        moved = [
            f"{path}: expected it to lie after a step as before, {a.sharding}, got "
            f"{after[path].sharding}"
            for path, a in before.items()
            if not after[path].sharding.is_equivalent_to(a.sharding, a.ndim)
        ]
        unlike = (
            f"devices hold different numbers of {path} after a step"
            for path in unlike_copies(after)
        )
        failures = [*findings("moved", moved), *findings("unlike-copies", unlike)]
        start, end = (
            wide(to_torch({path: np.asarray(a) for path, a in arrays.items()}))
            for arrays in (before, after)
        )
        kind = "gradient of parameter"
        reports = []
        for name, gradient in prepared.exact.kinds[kind].items():
            want = start[name] - _RATE * gradient
            budget = self._budget(prepared.budgets[kind][name], start[name], want)
            named = {"kind": "parameter after a step", "name": name, "transform": "jit"}
            reports.append(judge(want, end[name], None, budget, **named))
        return reports, failures

    def _budget(self, gradient: Budget, start: np.ndarray, want: np.ndarray) -> Budget:
        """Return a step's budget: the gradient's, and two roundings at the parameter's size."""
        precision = PRECISIONS[self.preparation.case.dtype]
        stored = 2 * precision.store * (np.abs(start) + _RATE * gradient.element)
        whole = _RATE * gradient.rms + rms(stored)
        return replace(
            gradient,
            element=_RATE * gradient.element + stored,
            rms=whole,
            projection=whole / rms(want),  # an upper bound, by Cauchy and Schwarz
            zero=_RATE * gradient.zero + rms(stored),
        )


def _step(
    forward: Forward, params: nnx.State, floats: Tree, others: Tree, cotangents: Tree
) -> nnx.State:
    """Return the parameters after a step by the gradient of sum(cotangent * output)."""

    def loss(params: nnx.State) -> jax.Array:
        outputs, _ = forward(params, floats, others)
        return sum((c * outputs[name]).sum() for name, c in cotangents.items())

    return jax.tree.map(lambda p, gradient: p - _RATE * gradient, params, jax.grad(loss)(params))


def _temporaries(program: jax.stages.Compiled) -> int:
    memory: Any = program.memory_analysis()
    return int(memory.temp_size_in_bytes)


def _spec(name: str, array: np.ndarray) -> PartitionSpec:
    heads = HEADS if name in _BY_HEAD and array.shape[1] > 1 else None
    return PartitionSpec(DATA, heads) if heads else PartitionSpec(DATA)


def _beyond(name: str, operations: Sequence[Sent], most: int, most_gathered: int) -> Iterator[str]:
    """Yield the collectives above the limits in bytes of sums and of gathered arrays."""
    arrays = [each for each in operations if each.bytes > _DECISION]
    allowed = {"all-reduce": most, "all-gather": most_gathered}
    for kind in dict.fromkeys(each.kind for each in arrays):
        got, expected = total([e for e in arrays if e.kind == kind]), allowed.get(kind, 0)
        if got > expected:
            yield f"{name}: expected {kind}s of at most {expected} bytes on each device, got {got}"
