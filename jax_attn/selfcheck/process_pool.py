"""Run many rows, in one process for each core, and yield each result when it is ready."""

import os
import signal
import tempfile
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import lru_cache
from itertools import count
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from jax_attn.parity.judge.result import NotRun, Result
from jax_attn.selfcheck.calibration.configurations import Configuration
from jax_attn.selfcheck.calibration.report import PortTrial
from jax_attn.selfcheck.matrix.cases import Case
from jax_attn.selfcheck.matrix.rows import COMPILED_KERNELS, seconds
from jax_attn.selfcheck.power.kill_report import Kill

if TYPE_CHECKING:
    from jax_attn.selfcheck.matrix.mesh_rows import MeshCase

Item = TypeVar("Item")


class Piece(NamedTuple):
    """A piece of work: `function(*arguments)` returns a list.

    rows: the number of rows that it judges. cost: roughly the expected CPU seconds; costs are only
    compared between pieces of one kind of work.
    """

    function: Callable[..., list]
    arguments: tuple[Any, ...]
    rows: int = 1
    cost: float = 1.0


# A process takes seconds to start: below this many rows, a single one is faster.
_WORTH_A_PROCESS = 16

_CHANGES = count(1)
"""Counts changes of shape or dtype from one row to the next."""


def run_rows(
    cases: Sequence[Case], backend: str, implementation: str | None = None
) -> list[Result | NotRun]:
    """Judge rows of one preparation, measured on `backend`, or emulated if they say so.

    implementation: the attention kernel that the ports insist on; None lets them choose.
    """
    from jax_attn.selfcheck.matrix.run_rows import run_cases, run_emulated
    from jax_attn.selfcheck.power.trials import doubts

    first = cases[0]
    _forget_programs_of_others(first.shape, first.dtype)
    if first.transform == "emulated":
        return [run_emulated(case, implementation, doubts=doubts) for case in cases]
    return run_cases(cases, backend, implementation, doubts=doubts)


def run_on_mesh(
    rows: Sequence["MeshCase"], backend: str, implementation: str | None = None
) -> list[Result | NotRun]:
    """Judge rows of one preparation on meshes of devices of `backend`."""
    from jax_attn.selfcheck.matrix import on_mesh
    from jax_attn.selfcheck.power.trials import doubts

    _forget_programs_of_others(rows[0].case.shape, rows[0].case.dtype)
    return on_mesh.run_on_mesh(rows, backend, implementation, doubts=doubts)


@lru_cache(maxsize=1)
def _forget_programs_of_others(shape: str, dtype: str) -> None:
    """Clear JAX's caches at every fourth change of shape or dtype.

    Programs of other shapes take up to a gigabyte and are rarely reused. Operations that one row
    compiles serve the next one of its shape and dtype; those that draw keys serve every row.
    """
    import jax

    if next(_CHANGES) % 4 == 0:
        jax.clear_caches()


def kill_block(cases: Sequence[Case]) -> list[Kill]:
    """Try every bug that these rows claim to detect; each row has its own preparation."""
    from jax_attn.parity.run.port import x64_for
    from jax_attn.selfcheck.matrix.designs import PORTED_DESIGNS
    from jax_attn.selfcheck.matrix.preparation import Preparation
    from jax_attn.selfcheck.power import trials

    kills = []
    for case in cases:
        with x64_for(case.dtype):
            kills += trials.kills(Preparation(PORTED_DESIGNS[case.design], case))
    return kills


def calibrate_block(configurations: Sequence[Configuration]) -> list[PortTrial]:
    """Judge correct configurations of one program."""
    import jax

    from jax_attn.selfcheck.calibration.calibrate import judged

    trials = judged(configurations)
    jax.clear_caches()
    return trials


def compile_block(design: str) -> list[NotRun]:
    """Compile one design, or one kernel, and return the compilers' results."""
    from jax_attn.selfcheck.matrix.tpu import compile_design, compile_kernel

    return list(compile_kernel(design) if design in COMPILED_KERNELS else compile_design(design))


def tasks(cases: Sequence[Case], backend: str, implementation: str | None = None) -> list[Piece]:
    """Make one piece of work from all rows of each preparation.

    The smallest comes first, for an early verdict; then the largest, so that no process is left
    with long work at the end. Pieces of one shape and dtype are adjacent.
    """
    pieces = _alike(cases, lambda case: case.preparation)
    pieces.sort(key=lambda c: (-c[0].size.work, c[0].shape, c[0].dtype))
    pieces = pieces[-1:] + pieces[:-1]
    return [Piece(run_rows, (c, backend, implementation), len(c), seconds(c)) for c in pieces]


def mesh_tasks(
    rows: "Sequence[MeshCase]", backend: str, implementation: str | None = None
) -> list[Piece]:
    """Make one piece of work from the mesh rows of each preparation, in the given order."""
    pieces = _alike(rows, lambda row: row.case.preparation)
    return [
        Piece(run_on_mesh, (piece, backend, implementation), len(piece), len(piece))
        for piece in pieces
    ]


def compile_tasks(designs: Sequence[str]) -> list[Piece]:
    """Make a piece for each design or kernel to compile for other devices; it judges no row."""
    return [Piece(compile_block, (design,), rows=0, cost=0.25) for design in designs]


def power_tasks(cases: Sequence[Case]) -> list[Piece]:
    """Make a piece for each preparation, on which bugs are tried once; the widest come first."""
    rows = list({case.preparation: case for case in reversed(cases)}.values())
    rows.sort(key=lambda c: c.size.work, reverse=True)
    return [Piece(kill_block, ((case,),), cost=1 + 6 * (case.size.D / 512) ** 2) for case in rows]


def calibration_tasks(configurations: Sequence[Configuration]) -> list[Piece]:
    """Make one piece from all configurations of each program; long rows come first."""
    programs = {piece[0].program: piece for piece in _alike(configurations, lambda c: c.program)}
    order = sorted(programs, key=lambda p: (p.size.S * p.size.T * p.size.N, p.name), reverse=True)
    return [
        Piece(calibrate_block, (piece,), len(piece), len(piece))
        for piece in map(programs.__getitem__, order)
    ]


def _alike(items: Sequence[Item], key: Callable[[Item], Hashable]) -> list[tuple[Item, ...]]:
    """Group the items by key, in the order in which the keys first occur."""
    pieces: dict[Hashable, list[Item]] = {}
    for item in items:
        pieces.setdefault(key(item), []).append(item)
    return [tuple(piece) for piece in pieces.values()]


def run(work: Sequence[Piece], processes: int | None = None) -> Iterator[tuple[Piece, list[Any]]]:
    """Yield each piece of work with its results, as pieces finish."""
    rows = sum(piece.rows for piece in work)
    processes = min(processes or os.cpu_count() or 1, max(1, rows // _WORTH_A_PROCESS))
    if processes == 1:
        yield from ((piece, piece.function(*piece.arguments)) for piece in work)
        return
    # Read when NumPy and torch load: threads of several processes would compete for the cores.
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    programs = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    pool = ProcessPoolExecutor(processes, get_context("spawn"), _begin, (programs.name,))
    try:
        pieces = {pool.submit(piece.function, *piece.arguments): piece for piece in work}
        for future in as_completed(pieces):
            yield pieces[future], future.result()
    finally:
        # Do not wait for running pieces when one fails or the user interrupts.
        workers = list((pool._processes or {}).values())
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.kill()  # a device's library may print its stack on SIGTERM
        programs.cleanup()


def _begin(programs: str) -> None:
    """Prepare a process of the pool, before it imports JAX.

    programs: a folder in which it keeps what it compiles, so that a program is compiled once even
    if JAX's caches are cleared. Each process has its own, also where the user names one: JAX writes
    a program under its final name, and another process, or a later one if this is killed meanwhile,
    would read what is half written.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the parent decides
    os.environ["JAX_COMPILATION_CACHE_DIR"] = os.path.join(programs, str(os.getpid()))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
