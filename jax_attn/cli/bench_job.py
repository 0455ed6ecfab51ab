"""The steps of `jax-attn bench`: run, show, and tell the exit status.

This module imports NumPy, so the command line imports it only when a run starts.
"""

import os
import signal
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from jax_attn.bench.engine.plan import BenchPlan
from jax_attn.bench.engine.session import Session
from jax_attn.bench.engine.worker import usable_cores
from jax_attn.bench.record import Record, Status
from jax_attn.bench.results import page, plot, table
from jax_attn.cli.common import progress
from jax_attn.cli.status import Exit
from jax_attn.parity.judge.text import console
from jax_attn.parity.pair.errors import PairError
from jax_attn.report.files import RESULT_FILES, write


def run(plan: BenchPlan, tpu: bool) -> tuple[Record, BaseException | None]:
    """Run with a progress bar on stderr; return the record, and the error that ended it or None.

    tpu: whether to add the TPU compiler's figures. Raises PairError.
    """
    cores, load = usable_cores(), os.getloadavg()[0]
    if load > 0.5 * cores:
        click.echo(f"Warning: the machine is busy: load {load:.1f} on {cores} cores", err=True)
    with Session(plan) as session:
        with closing(session.run()) as steps:
            ended_by = exhaust(progress.counted(steps, session.steps))
        record = session.record(interrupted=ended_by is not None)
    return add_compiled(record, plan) if tpu and ended_by is None else (record, ended_by)


def add_compiled(record: Record, plan: BenchPlan) -> tuple[Record, BaseException | None]:
    """Return the record with the TPU compiler's figures, and the error that ended it or None."""
    figures: list[dict[str, Any]] = []

    def steps() -> Iterator[None]:
        from jax_attn.bench.engine.tpu_compiler import compiled_for_tpu  # imports jax

        yield from map(figures.append, compiled_for_tpu(plan.workloads, plan.modes))

    ended_by = exhaust(steps())
    return replace(record, compiled=tuple(figures), interrupted=ended_by is not None), ended_by


def exhaust(steps: Iterable[object]) -> BaseException | None:
    """Run every step; return the error that ended them early, so that results are kept first."""
    try:
        for _ in steps:
            pass
    except PairError:
        raise  # nothing was measured
    except (Exception, KeyboardInterrupt) as error:
        # Ignored until the command ends: a second Ctrl-C must not lose what the first one kept.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        click.get_current_context().call_on_close(lambda: signal.signal(signal.SIGINT, before))
        cause = "" if isinstance(error, KeyboardInterrupt) else f" by {type(error).__name__}"
        click.echo(f"interrupted{cause}: showing what was measured so far", err=True)
        return error
    return None


def show(
    record: Record, form: str, plots: Path | None, reports: Path | None, output: Path | None
) -> None:
    """Write the record, its page and the plots to the given paths, and print the record.

    form: the option that selects the printed form; "" prints a table.
    """
    if output is not None:
        write(output.parent, {output.name: record.to_json()})
    if reports is not None:
        texts = (record.to_json(), table.markdown(record), page.page(record))
        write(reports, dict(zip(RESULT_FILES, texts, strict=True)))
        click.echo(f"written: {reports / RESULT_FILES[-1]}", err=True)
    printed = {"--json": Record.to_json, "--markdown": table.markdown, "--csv": table.csv}
    if form:
        click.echo(printed[form](record).rstrip("\n"))
    else:
        out = console()
        out.print(table.terminal(record, out.width))
    if plots is not None:
        for drawn in plot.draw(record, plots) or ("nothing, because nothing was timed",):
            click.echo(f"drawn: {drawn}", err=True)


def status(record: Record) -> Exit:
    """Return the exit status of a record.

    INTERRUPTED if it was; else FAIL if a row is wrong; else INCONCLUSIVE if a verdict is, if
    nothing was timed, or if a timed row has no ratio; else PASS.
    """
    if record.interrupted:
        return Exit.INTERRUPTED
    wrong = (Status.EXCLUDED, Status.FAILED)
    if any(row.status in wrong or row.verdict == "FAIL" for row in record.rows):
        return Exit.FAIL
    doubtful = any(row.verdict == "INCONCLUSIVE" for row in record.rows)
    timed = [row for row in record.rows if row.seconds]
    compared = timed and all(row.ratio for row in timed)
    return Exit.PASS if compared and not doubtful else Exit.INCONCLUSIVE
