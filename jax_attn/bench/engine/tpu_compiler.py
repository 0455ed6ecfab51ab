"""Figures of the TPU's own compiler for our programs, on a host without a TPU.

None of these figures is measured, so they are kept apart from the measurements and have no times.
"""

from collections.abc import Iterator, Sequence
from pkgutil import resolve_name
from typing import Any

import jax

from jax_attn.bench.arrays import input_names, seeded_arrays
from jax_attn.bench.engine.jax_engine import with_gradients
from jax_attn.bench.implementations import IMPLEMENTATIONS, OURS
from jax_attn.bench.workload import BACKWARD, Workload
from jax_attn.parity.run.compiled import compile_for_tpu, why_no_tpu_compiler

LEVEL = "compiled: the compiler's figures, not measured"


def compiled_for_tpu(
    workloads: Sequence[Workload], modes: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Compile the kernel chosen on this host, a layer or a cached call, for one TPU v5e.

    Yields plain data with level, workload, mode, kernel, precision (of the products), useful_flops
    (`Workload.flops`); and from `compile_for_tpu`: target, compiler, seconds, flops, bytes
    (accessed), temporaries, arguments, outputs (bytes). XLA counts the body of a loop once, however
    often it runs, so the flops and bytes of a blocked kernel are below the true ones. If a program
    raises anything, `error` stands in their place. Without libtpu there is one item: level, and
    `missing`, which says how to install it.
    """
    if reason := why_no_tpu_compiler():
        yield {"level": LEVEL, "missing": reason}
        return
    for workload in workloads:
        for mode in filter(modes.__contains__, workload.modes):
            figures: dict[str, Any] = {
                "level": LEVEL,
                "workload": workload.name,
                "mode": mode,
                "precision": "highest",
                "useful_flops": workload.flops(mode),
            }
            try:
                figures |= _compiled(workload, mode)
            except Exception as error:
                first = str(error).strip().partition("\n")[0]
                figures["error"] = f"{type(error).__name__}: {first}"
            yield figures


@jax.default_matmul_precision("highest")
def _compiled(workload: Workload, mode: str) -> dict[str, Any]:
    arrays = seeded_arrays(workload)
    program = resolve_name(IMPLEMENTATIONS[OURS].builder(workload))(workload, arrays)
    leaves = [*(arrays[name] for name in input_names(workload)), *program.weights.values()]
    fn, args = program.call, [program.cache, *leaves] if workload.room else leaves
    if mode == BACKWARD:
        fn, args = with_gradients(program.call), [arrays["cotangent"], *leaves]
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), args)
    figures = compile_for_tpu(fn, *shapes)
    figures.pop("collectives", None)
    return {"kernel": program.kernel} | figures
