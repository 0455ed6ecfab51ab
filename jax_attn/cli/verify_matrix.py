"""Run the rows of the built-in matrix that the options of `jax-attn verify` leave."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from jax_attn.cli.common import devices
from jax_attn.cli.common.selection import NONE_LEFT, expect_known, selected
from jax_attn.cli.status import missing

if TYPE_CHECKING:
    from jax_attn.parity.judge.result import NotRun, Result
    from jax_attn.parity.matrix.cases import Case


def verify_matrix(
    designs: Sequence[str],
    dtypes: Sequence[str],
    backend: str,
    pattern: str,
    implementation: str | None,
) -> "tuple[list[Result], list[NotRun]]":
    """Results, and what was compiled or refused, with a progress bar on stderr."""
    work, rows = plan(designs, dtypes, backend, pattern, implementation)

    from jax_attn.cli.common.progress import tracked
    from jax_attn.parity import process_pool
    from jax_attn.parity.judge.result import NotRun

    # Processes would each take the whole of a GPU or a TPU.
    processes = None if devices.available() <= {"cpu"} else 1
    outcomes = tracked(process_pool.run(work, processes), process_pool.size(work))
    order = {case.name: i for i, case in enumerate(c for cases in rows.values() for c in cases)}
    results = [outcome for outcome in outcomes if not isinstance(outcome, NotRun)]
    not_run = [outcome for outcome in outcomes if isinstance(outcome, NotRun)]
    results.sort(key=lambda result: order[result.name])
    not_run.sort(key=lambda item: (item.design, item.direction))
    return results, not_run


def plan(
    designs: Sequence[str],
    dtypes: Sequence[str],
    backend: str,
    pattern: str,
    implementation: str | None,
) -> "tuple[list[tuple[Any, ...]], dict[str, list[Case]]]":
    """The work that the filters leave, and the cases by backend."""
    from jax_attn.attention.dispatch import KERNELS
    from jax_attn.parity import process_pool
    from jax_attn.parity.matrix import cases

    if implementation is not None:
        expect_known("--implementation", (implementation,), KERNELS)
    measured = selected(designs, dtypes, pattern)
    emulated = selected(designs, dtypes, pattern, cases.emulated())
    here = devices.available()
    backends = [b for b in devices.KINDS if backend in (b, "all")]
    if backend == "gpu":
        devices.expect_gpu()
    if backend == "cpu" and "cpu" not in here:
        missing("jax was told to leave the CPU out: add cpu to JAX_PLATFORMS")
    rows = {b: measured for b in backends if b in here}
    work = [
        task for b, kept in rows.items() for task in process_pool.tasks(kept, b, (), implementation)
    ]
    if "tpu" in backends and "tpu" not in here:
        rows["tpu"] = emulated
        compiled = tuple(d for d in cases.published() if not designs or d in designs)
        # What is compiled is no case: a filter on cases leaves it out.
        compiled = () if pattern or dtypes or implementation else compiled
        compiled += cases.COMPILED_KERNELS if compiled and not designs else ()
        work += process_pool.tasks(rows["tpu"], "tpu", compiled, implementation)
    if not any(rows.values()):
        raise click.UsageError(NONE_LEFT)
    return work, rows
