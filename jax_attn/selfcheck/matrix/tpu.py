"""Compile designs and kernels for a TPU on a host without one.

This does not show parity on a TPU. The TPU's own compiler accepts a compiled design; without
libtpu, designs are only lowered for every platform. Nothing is run, so there is no verdict.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_attn.attention import dispatch
from jax_attn.attention.call import checked_call
from jax_attn.parity.judge.result import NotRun
from jax_attn.parity.run.compiled import (
    compile_for_tpu,
    lower_everywhere,
    mesh_for_tpu,
    why_no_tpu_compiler,
)
from jax_attn.parity.run.placement import in_words
from jax_attn.parity.run.transforms import forward_and_gradients
from jax_attn.selfcheck.matrix.cases import Case
from jax_attn.selfcheck.matrix.designs import PORTED_DESIGNS
from jax_attn.selfcheck.matrix.preparation import Preparation
from jax_attn.selfcheck.matrix.rows import EMULATED_SHAPE

TOPOLOGIES = ("v5e:2x2", "v6e:2x2", "tpu7x:2x2x1")
# The kernels are made for longer sequences than the designs' shapes have.
_T, _H = 256, 64
_ALONE = 1, 4, 2
"""B, N and K."""
# Each of eight devices has two rows, four query heads and two key/value heads.
_ON_SLICE, _SLICE, _MESH = (4, 16, 8), "v5e:2x4", {"data": 2, "heads": 4}
# XLA cannot partition splash by itself.
_KINDS = {"blocked": (AxisType.Auto, AxisType.Explicit), "splash": (AxisType.Explicit,)}


def compile_kernel(name: str) -> Iterator[NotRun]:
    """Compile a kernel's forward and gradient, causal, in bfloat16, with the TPU compiler.

    It is compiled for one device of each topology, and for a slice, sharded along batch and heads.
    """
    missing = why_no_tpu_compiler()
    yield from _compiled_kernel(name, _ALONE, TOPOLOGIES, missing)
    for kind in () if missing else _KINDS[name]:
        mesh = mesh_for_tpu(_SLICE, _MESH, kind)
        at = NamedSharding(mesh, PartitionSpec("data", None, "heads"))
        yield from _compiled_kernel(name, _ON_SLICE, [_SLICE], at=at)


def _compiled_kernel(
    name: str,
    sizes: tuple[int, int, int],
    topologies: Sequence[str],
    missing: str | None = None,
    at: NamedSharding | None = None,
) -> Iterator[NotRun]:
    """Compile a kernel for each topology.

    sizes: B, N and K. missing: why there is no compiler, if so. at: the sharding on a mesh, if any.
    """
    B, N, K = sizes
    q, kv = (jax.ShapeDtypeStruct((B, _T, n, _H), "bfloat16", sharding=at) for n in (N, K))
    kernel = replace(dispatch.KERNELS[name], only_on=None)  # traced here, compiled for TPUs
    design = f"kernel {name}" if at is None else f"kernel {name}, {in_words(at.mesh)}"

    def forward(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return dispatch.run(checked_call(name, q, k, v, is_causal=True), kernel)

    def gradient(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        *qkv, d_out = arrays
        return jax.vjp(forward, *qkv)[1](d_out)

    # Two products forward with the scores that causality leaves, and five more backward, which
    # computes the scores again. XLA does not see into a Pallas kernel, nor count the iterations of
    # a loop. As in XLA's counts, this is one device's part.
    product = 2 * B * N * _H * _T * (_T + 1) // 2 // (1 if at is None else at.mesh.size)
    for direction, fn, shapes, products in (
        ("forward", forward, (q, kv, kv), 2),
        ("gradient", gradient, (q, kv, kv, q), 7),
    ):
        subject = (design, direction, "bfloat16", f"{q.shape}")
        if missing:
            yield NotRun(*subject, "not compiled", "tpu", error=missing)
            continue
        counted = {"flops": products * product, "flops_by": "formula"}
        for row in compiled_everywhere(subject, fn, shapes, topologies):
            is_compiled = row.level == "compiled"
            yield replace(row, figures={**row.figures, **counted}) if is_compiled else row


def compiled_everywhere(
    subject: tuple[str, str, str, str],
    fn: Callable[..., Any],
    args: Sequence[Any],
    topologies: Sequence[str],
) -> Iterator[NotRun]:
    """Yield the TPU compiler's figures of `fn` for each topology, or why it refuses it.

    subject: design, direction, dtype and shape.
    """
    for topology in topologies:
        try:
            figures = compile_for_tpu(fn, *args, topology=topology)
        except Exception as error:  # XLA's errors and, for a Pallas kernel, Mosaic's
            why = f"{type(error).__name__}: {error}".strip().splitlines()[0]
            yield NotRun(*subject, "failed", topology, error=why)
        else:
            target = figures.pop("target")
            figures["flops_by"] = "compiler"
            yield NotRun(*subject, "compiled", target, figures=figures)


def compile_design(name: str) -> Iterator[NotRun]:
    """Compile a design's forward and gradient for TPUs, or lower them for all platforms."""
    case = Case(name, "float32", "none", EMULATED_SHAPE, "")
    forward, *args = Preparation(PORTED_DESIGNS[name], case).port.bind()
    shapes, _ = jax.eval_shape(forward, *args)

    def gradient(*args: Any) -> Any:
        return forward_and_gradients(forward, *args)

    for direction, fn, abstract in (
        ("forward", forward, args),
        ("gradient", gradient, (*args, shapes)),
    ):
        subject = (name, direction, "float32", EMULATED_SHAPE)
        if why_no_tpu_compiler() is None:
            yield from compiled_everywhere(subject, fn, abstract, TOPOLOGIES)
            continue
        for platform, figures in lower_everywhere(fn, *abstract).items():
            error = figures.pop("error")
            level = "failed" if error else "lowered"
            yield NotRun(*subject, level, platform, error, figures)
