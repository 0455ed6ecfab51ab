"""Designs and kernels compiled for a TPU on a host without one.

This is not parity on a TPU. A compiled design was accepted by the TPU's own compiler, or, without
libtpu, lowered for every platform; nothing was run, so it has no verdict.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_attn.attention import dispatch
from jax_attn.attention.call import checked_call
from jax_attn.parity.judge.result import NotRun
from jax_attn.parity.matrix.cases import Case
from jax_attn.parity.matrix.compiled import (
    compile_for_tpu,
    lower_everywhere,
    mesh_for_tpu,
    why_no_tpu_compiler,
)
from jax_attn.parity.matrix.designs import PORTED_DESIGNS
from jax_attn.parity.matrix.preparation import Preparation
from jax_attn.parity.matrix.rows import EMULATED_SHAPE
from jax_attn.parity.run.port import forward_and_gradients

TOPOLOGIES = ("v5e:2x2", "v6e:2x2", "tpu7x:2x2x1")
# Of a length that the kernels are made for, as the designs' shapes are not.
_T, _H = 256, 64
_SLICE, _MESH = "v5e:2x4", {"data": 2, "heads": 4}
# XLA cannot cut splash by itself.
_KINDS = {"blocked": (AxisType.Auto, AxisType.Explicit), "splash": (AxisType.Explicit,)}


def compile_kernel(name: str) -> Iterator[NotRun]:
    """Forward and gradient of a kernel, causal, in bfloat16, through the TPU compiler.

    On one device of each topology, and on a slice, cut along batch and heads.
    """
    if missing := why_no_tpu_compiler():
        for direction in ("forward", "gradient"):
            subject = (f"kernel {name}", direction, "bfloat16", f"{(1, _T, 4, _H)}")
            yield NotRun(*subject, "not compiled", "tpu", error=missing)
        return
    yield from _compiled_kernel(name, B=1, N=4, K=2, topologies=TOPOLOGIES)
    for kind in _KINDS[name]:
        mesh = mesh_for_tpu(_SLICE, _MESH, kind)
        where = (
            f"{name}, {', '.join(f'{axis}={size}' for axis, size in _MESH.items())} ({kind.name})"
        )
        at = NamedSharding(mesh, PartitionSpec("data", None, "heads"))
        yield from _compiled_kernel(where, B=2, N=8, K=4, topologies=[_SLICE], at=at)


def _compiled_kernel(
    where: str, B: int, N: int, K: int, topologies: Sequence[str], at: NamedSharding | None = None
) -> Iterator[NotRun]:
    """where: the kernel's name, and behind a comma the mesh. at: how arrays lie on it."""
    q, kv = (jax.ShapeDtypeStruct((B, _T, n, _H), "bfloat16", sharding=at) for n in (N, K))
    name = where.partition(",")[0]
    kernel = replace(dispatch.KERNELS[name], only_on=None)  # traced here, compiled for there

    def forward(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return dispatch.run(checked_call(name, q, k, v, is_causal=True), kernel)

    def gradient(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        *qkv, d_out = arrays
        return jax.vjp(forward, *qkv)[1](d_out)

    # Of the scores that causality leaves: two products forward, five more backward, where the
    # scores are computed again. XLA does not see into a Pallas kernel, nor count a loop's turns.
    product = 2 * B * N * _H * _T * (_T + 1) // 2 // (1 if at is None else at.mesh.size)
    for direction, fn, shapes, products in (
        ("forward", forward, (q, kv, kv), 2),
        ("gradient", gradient, (q, kv, kv, q), 7),
    ):
        subject = (f"kernel {where}", direction, "bfloat16", f"{q.shape}")
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
    """What the TPU compiler says of `fn` for each topology, or why it refuses it.

    subject: design, direction, dtype and shape.
    """
    for topology in topologies:
        try:
            figures = compile_for_tpu(fn, *args, topology=topology)
        except Exception as error:  # the compiler's own and, of a Pallas kernel, Mosaic's
            why = f"{type(error).__name__}: {error}".strip().splitlines()[0]
            yield NotRun(*subject, "failed", topology, error=why)
        else:
            target = figures.pop("target")
            figures["flops_by"] = "compiler"
            yield NotRun(*subject, "compiled", target, figures=figures)


def compile_design(name: str) -> Iterator[NotRun]:
    """Forward and gradient of a design through the TPU compiler, or lowered for all platforms."""
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
