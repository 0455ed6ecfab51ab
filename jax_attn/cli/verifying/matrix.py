"""Run the rows of the built-in matrix that the options of `jax-attn verify` select."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from jax_attn.cli.common import devices
from jax_attn.cli.common.selection import NONE_BY_DEFAULT, NONE_LEFT, expect_known, selected
from jax_attn.cli.status import missing
from jax_attn.cli.verifying.outcome import Outcome

if TYPE_CHECKING:
    from jax_attn.selfcheck.process_pool import Piece

Filters = tuple[Sequence[str], Sequence[str], str]
"""Designs, dtypes, and a text that the names of the rows contain."""


def verify_matrix(
    filters: Filters, backend: str, implementation: str | None, *, every_row: bool, shown: bool
) -> Outcome:
    """Judge the selected rows, with a progress bar on stderr."""
    work, names, left_out = plan(filters, backend, implementation, every_row)

    from jax_attn.cli.common.progress import worked_off

    # Each process would reserve the whole GPU or TPU.
    processes = None if devices.available() <= {"cpu"} else 1
    return Outcome(names, shown, left_out).collect(worked_off(work, processes))


def plan(
    filters: Filters, backend: str, implementation: str | None, every_row: bool
) -> "tuple[list[Piece], list[str], int]":
    """Return the selected work, the names of its rows, and the number of rows that --all adds."""
    from jax_attn.selfcheck import process_pool
    from jax_attn.selfcheck.matrix import rows

    designs, dtypes, pattern = filters
    if implementation is not None:
        from jax_attn.attention.dispatch import KERNELS

        expect_known("--implementation", (implementation,), KERNELS)
    every = selected(rows.matrix(), *filters)
    measured = every if every_row else selected(rows.default(), *filters)
    every_emulated = selected(rows.emulated(), *filters)
    few_emulated = selected(rows.emulated_by_default(), *filters)
    emulated = every_emulated if every_row else few_emulated
    here = devices.available()
    backends = [b for b in devices.KINDS if backend in (b, "all")]
    if backend == "gpu":
        devices.expect_gpu()
    if backend == "cpu" and "cpu" not in here:
        missing("JAX_PLATFORMS excludes the CPU: add cpu to it")
    cases = {b: measured for b in backends if b in here}
    work = [
        task for b, kept in cases.items() for task in process_pool.tasks(kept, b, implementation)
    ]
    left_out = len(cases) * (len(every) - len(measured))
    if "tpu" in backends and "tpu" not in here:
        cases["tpu"] = emulated
        left_out += len(every_emulated) - len(emulated)
        compiled = tuple(d for d in rows.published() if not designs or d in designs)
        # A compiled design is not a case, so filters on cases exclude it.
        compiled = () if pattern or dtypes or implementation else compiled
        compiled += rows.COMPILED_KERNELS if compiled and not designs else ()
        work += process_pool.tasks(emulated, "tpu", implementation)
        work += process_pool.compile_tasks(compiled)
    if not any(cases.values()):
        raise click.UsageError(NONE_BY_DEFAULT if left_out else NONE_LEFT)
    names = [case.name for kept in cases.values() for case in kept]
    return work, names, left_out
