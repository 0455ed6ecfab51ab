"""Run many rows, on as many processes as there are cores, and give each result as it comes."""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import count, groupby
from multiprocessing import get_context
from typing import Any

from jax_attn.parity.cases import Case
from jax_attn.parity.result import Result

# A process takes seconds to start: below this many groups one alone is quicker.
_WORTH_A_PROCESS = 8


# Programs kept in memory: about 20 MiB a group, and few are met again.
_GROUPS_BETWEEN_CLEARINGS = 16
_groups_run = count(1)


def run_group(cases: Sequence[Case], backend: str) -> list[Result]:
    """Rows that share a preparation, measured on `backend`; "tpu" without one is emulated."""
    import jax

    from jax_attn.parity.matrix import run_cases
    from jax_attn.parity.tpu import run_emulated

    if next(_groups_run) % _GROUPS_BETWEEN_CLEARINGS == 0:
        jax.clear_caches()
    if cases[0].transform == "emulated":
        return [run_emulated(case) for case in cases]
    return run_cases(cases, backend)


def compile_group(design: str) -> list[dict[str, Any]]:
    """What the compilers say of one design."""
    from jax_attn.parity.tpu import compile_design

    return list(compile_design(design))


def tasks(cases: Sequence[Case], backend: str, compiled: Sequence[str]) -> list[tuple]:
    """(function, *arguments) of each piece of work: rows of one preparation, or one design."""
    groups = [tuple(rows) for _, rows in groupby(cases, key=lambda c: c.preparation)]
    return [(run_group, rows, backend) for rows in groups] + [
        (compile_group, design) for design in compiled
    ]


def run(work: Sequence[tuple], *, processes: int | None = None) -> Iterator[tuple[int, list]]:
    """(place in `work`, what it gave), as they finish."""
    processes = min(processes or os.cpu_count() or 1, max(1, len(work) // _WORTH_A_PROCESS))
    if processes == 1:
        for place, (fn, *args) in enumerate(work):
            yield place, fn(*args)
        return
    # Read when NumPy and torch load: threads of several processes would wait for one another.
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        places = {pool.submit(fn, *args): place for place, (fn, *args) in enumerate(work)}
        try:
            for future in as_completed(places):
                yield places[future], future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
