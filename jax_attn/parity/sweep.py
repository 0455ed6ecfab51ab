"""Run many rows, on as many processes as there are cores, and give each result as it comes."""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import groupby
from multiprocessing import get_context
from typing import Any

from jax_attn.parity.cases import Case
from jax_attn.parity.result import Result

# A process takes seconds to start: below this many groups one alone is quicker.
_WORTH_A_PROCESS = 8


_last: tuple[str, str] | None = None


def run_group(cases: Sequence[Case], backend: str) -> list[Result]:
    """Rows that share a preparation, measured on `backend`; "tpu" without one is emulated."""
    from jax_attn.parity.matrix import run_cases
    from jax_attn.parity.tpu import run_emulated

    _forget(cases[0].shape, cases[0].dtype)
    if cases[0].transform == "emulated":
        return [run_emulated(case) for case in cases]
    return run_cases(cases, backend)


def _forget(shape: str, dtype: str) -> None:
    """Drop the programs of another shape: they take gigabytes in all and are not met again."""
    global _last
    if _last not in (None, (shape, dtype)):
        import jax

        jax.clear_caches()
    _last = shape, dtype


def compile_group(design: str) -> list[dict[str, Any]]:
    """What the compilers say of one design."""
    from jax_attn.parity.tpu import compile_design

    return list(compile_design(design))


def tasks(cases: Sequence[Case], backend: str, compiled: Sequence[str]) -> list[tuple]:
    """(function, *arguments) of each piece of work: rows of one preparation, or one design."""
    groups = [tuple(rows) for _, rows in groupby(cases, key=lambda c: c.preparation)]
    # What one row compiles, eager ones above all, the next of its shape and dtype needs too.
    groups.sort(key=lambda rows: (rows[0].shape, rows[0].dtype))
    return [(run_group, rows, backend) for rows in groups] + [
        (compile_group, design) for design in compiled
    ]


def run(work: Sequence[tuple], processes: int | None = None) -> Iterator[list]:
    """What each piece of work gave, as they finish."""
    processes = min(processes or os.cpu_count() or 1, max(1, len(work) // _WORTH_A_PROCESS))
    if processes == 1:
        yield from (fn(*args) for fn, *args in work)
        return
    # Read when NumPy and torch load: threads of several processes would wait for one another.
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    pool = ProcessPoolExecutor(processes, mp_context=get_context("spawn"))
    try:
        for future in as_completed([pool.submit(fn, *args) for fn, *args in work]):
            yield future.result()
    finally:
        # What is under way when one piece fails, or the user interrupts, is not waited for.
        workers = list((pool._processes or {}).values())
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.terminate()
