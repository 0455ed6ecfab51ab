"""Run many rows, on as many processes as there are cores, and give each result as it comes."""

import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import groupby
from multiprocessing import get_context

from jax_attn.parity.bugs.kill_report import Kill
from jax_attn.parity.calibration.configurations import Configuration, Program
from jax_attn.parity.calibration.report import Trial
from jax_attn.parity.judge.result import NotRun, Result
from jax_attn.parity.matrix.cases import COMPILED_KERNELS, Case

# A process takes seconds to start: below this many rows one alone is quicker.
_WORTH_A_PROCESS = 16


def run_block(
    cases: Sequence[Case], backend: str, implementation: str | None = None
) -> list[Result | NotRun]:
    """Rows of one shape and dtype, measured on `backend`, or emulated where they say so.

    implementation: the attention kernel that the ports insist on; None lets them choose.
    """
    import jax

    from jax_attn.parity.bugs.trials import doubts
    from jax_attn.parity.matrix.run_rows import run_cases, run_emulated

    results = []
    for _, rows in groupby(cases, key=lambda c: c.preparation):
        group = list(rows)
        if group[0].transform == "emulated":
            results += [run_emulated(case, implementation, doubts=doubts) for case in group]
        else:
            results += run_cases(group, backend, implementation, doubts=doubts)
    # Programs of this shape take up to a gigabyte in all, and are not met again.
    jax.clear_caches()
    return results


def kill_block(cases: Sequence[Case]) -> list[Kill]:
    """The trials of every bug that these rows, each of a preparation of its own, claim to see."""
    from jax_attn.parity.bugs import trials
    from jax_attn.parity.matrix.designs import PORTED_DESIGNS
    from jax_attn.parity.matrix.preparation import Preparation
    from jax_attn.parity.run.port import x64_for

    kills = []
    for case in cases:
        with x64_for(case.dtype):
            kills += trials.kills(Preparation(PORTED_DESIGNS[case.design], case))
    return kills


def calibrate_block(configurations: Sequence[Configuration]) -> list[Trial]:
    """The verdicts on correct configurations of one program."""
    import jax

    from jax_attn.parity.calibration.calibrate import judged

    trials = judged(configurations)
    jax.clear_caches()
    return trials


def compile_block(design: str) -> list[NotRun]:
    """What the compilers say of one design, or of one kernel."""
    from jax_attn.parity.matrix.tpu import compile_design, compile_kernel

    return list(compile_kernel(design) if design in COMPILED_KERNELS else compile_design(design))


def tasks(
    cases: Sequence[Case], backend: str, compiled: Sequence[str], implementation: str | None = None
) -> list[tuple]:
    """(function, *arguments) of each piece of work, the longest first.

    A piece is all rows of one shape and dtype: what one compiles, eager rows above all, the
    next needs too.
    """

    def alike(case: Case) -> tuple[str, str]:
        return case.shape, case.dtype

    blocks = [tuple(rows) for _, rows in groupby(sorted(cases, key=alike), key=alike)]
    blocks.sort(key=len, reverse=True)
    return [(run_block, rows, backend, implementation) for rows in blocks] + [
        (compile_block, design) for design in compiled
    ]


def power_tasks(cases: Sequence[Case]) -> list[tuple]:
    """Likewise of trying the bugs, once on all rows of one preparation; the widest first."""
    rows = list({case.preparation: case for case in reversed(cases)}.values())
    rows.sort(key=lambda c: c.size.work, reverse=True)
    return [(kill_block, (case,)) for case in rows]


def calibration_tasks(configurations: Sequence[Configuration]) -> list[tuple]:
    """Likewise of calibration: a piece is all configurations of one program; long rows first."""
    programs: dict[Program, list[Configuration]] = {c.program: [] for c in configurations}
    for configuration in configurations:
        programs[configuration.program].append(configuration)
    order = sorted(programs, key=lambda p: (p.size.S * p.size.T * p.size.N, p.name), reverse=True)
    return [(calibrate_block, tuple(programs[program])) for program in order]


def size(work: Sequence[tuple]) -> int:
    """The rows in `work`."""
    return sum(len(args[0]) for _, *args in work if isinstance(args[0], tuple))


def run(work: Sequence[tuple], processes: int | None = None) -> Iterator[list]:
    """What each piece of work gave, as they finish."""
    processes = min(processes or os.cpu_count() or 1, max(1, size(work) // _WORTH_A_PROCESS))
    if processes == 1:
        yield from (fn(*args) for fn, *args in work)
        return
    # Read when NumPy and torch load: threads of several processes would wait for one another.
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    alone = signal.SIGINT, signal.SIG_IGN  # Ctrl-C reaches all; who started them decides
    pool = ProcessPoolExecutor(processes, get_context("spawn"), signal.signal, alone)
    try:
        for future in as_completed([pool.submit(fn, *args) for fn, *args in work]):
            yield future.result()
    finally:
        # What is under way when one piece fails, or the user interrupts, is not waited for.
        workers = list((pool._processes or {}).values())
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.terminate()
