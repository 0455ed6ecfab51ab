"""`jax-attn bench`: every implementation side by side, timed only where it agrees."""

import os
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import click

from jax_attn.cli.bench_compare import command as compare
from jax_attn.cli.devices import expect_gpu
from jax_attn.cli.status import Exit, expect_installed
from jax_attn.environment import settle_platforms

DTYPES = ("float32", "bfloat16", "float16")
# mode → the preset that is measured where no other is asked for.
PRESET_OF = {
    "forward": "quick",
    "forward+backward": "quick",
    "prefill": "prefill",
    "decode": "decode",
}


@click.group("bench", invoke_without_command=True)
@click.pass_context
@click.option(
    "--preset",
    "presets",
    multiple=True,
    help="What is measured: a preset or a workload's name; may be repeated. Unless given: quick, "
    "or what the mode is named after.",
)
@click.option("--implementation", "names", multiple=True, help="Only this one; may be repeated.")
@click.option(
    "--mode",
    "modes",
    multiple=True,
    type=click.Choice(list(PRESET_OF)),
    help="Only this mode of those that a workload has; may be repeated. With a cache: prefill, "
    "of many tokens, or decode, of one.",
)
@click.option("--baseline", default="sdpa", show_default=True, help="What ratios are over.")
@click.option(
    "--rounds",
    type=click.IntRange(1),
    help="Just so many rounds; 7 to 21 by their time unless given.",
)
@click.option("--threads", type=click.IntRange(1), help="Threads, and cores; all unless given.")
@click.option("--dtype", type=click.Choice(DTYPES), default="float32", show_default=True)
@click.option("--device", type=click.Choice(["cpu", "gpu"]), default="cpu", show_default=True)
@click.option("--tpu", is_flag=True, help="Also what the TPU's compiler says of our programs.")
@click.option("--json", "as_json", is_flag=True, help="The whole record as JSON on stdout.")
@click.option("--markdown", "as_markdown", is_flag=True, help="Tables in Markdown on stdout.")
@click.option(
    "--plot",
    "plots",
    type=click.Path(path_type=Path, file_okay=False),
    help="Draw time, memory and roofline into this directory, SVG and PNG.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Keep the record, as JSON, in this file.",
)
@click.option("--list", "listing", is_flag=True, help="Presets, and implementations here or not.")
def command(
    context: click.Context,
    presets: tuple[str, ...],
    names: tuple[str, ...],
    modes: tuple[str, ...],
    baseline: str,
    rounds: int | None,
    threads: int | None,
    dtype: str,
    device: str,
    tpu: bool,
    as_json: bool,
    as_markdown: bool,
    plots: Path | None,
    output: Path | None,
    listing: bool,
) -> None:
    """Time attention in PyTorch and JAX side by side.

    Each implementation is judged against float64 first; one that disagrees is excluded. The
    rest run in processes of their own, in interleaved rounds, with the same threads. Ctrl-C
    ends the run and keeps what was measured.

    Exit status: 1 where an implementation is excluded or fails, 4 where no verdict could be
    had, nothing was timed or the baseline has no time, 130 where the run was interrupted.
    """
    if context.invoked_subcommand is not None:
        return
    if listing:
        click.echo(catalogue())
        return
    presets = presets or tuple(dict.fromkeys(PRESET_OF[mode] for mode in modes)) or ("quick",)
    problems = [
        *(
            ["--json, --markdown: expected one of them, got both"]
            if as_json and as_markdown
            else []
        ),
        *unknown(presets, names, baseline),
        *without_mode(presets, modes),
        *too_many(threads),
        *unwritable({"--output": output and output.parent, "--plot": plots}),
    ]
    if problems:
        raise click.UsageError("\n".join(problems))
    expect_installed("torch", "is the baseline", "torch")
    if plots is not None:
        expect_installed("matplotlib", "--plot draws with it", "bench")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # workers need the card too
    settle_platforms()
    if device == "gpu":
        expect_gpu()
    given = asked(presets, modes, dtype)
    record, ended_by = measured(*given, names, baseline, rounds, threads, device)
    if tpu and ended_by is None:
        record, ended_by = with_compiled(record, *given)
    show(record, as_json, as_markdown, plots, output)
    if isinstance(ended_by, Exception):
        raise ended_by
    sys.exit(status(record))


command.add_command(compare)


def catalogue() -> str:
    """What can be asked for, a line each."""
    from jax_attn.bench.implementations import IMPLEMENTATIONS
    from jax_attn.bench.presets import PRESETS

    lines = ["presets"]
    lines += [f"  {name:20} {', '.join(w.name for w in PRESETS[name])}" for name in PRESETS]
    lines += ["implementations"]
    for i in IMPLEMENTATIONS.values():
        where = "" if "cpu" in i.devices else ", with --device gpu or by name"
        lines.append(f"  {i.name:20} {i.absent or i.framework + where}")
    return "\n".join(lines)


def unknown(presets, names, baseline) -> list[str]:
    """A line for each option with names that are not known."""
    from jax_attn.bench.implementations import IMPLEMENTATIONS
    from jax_attn.bench.presets import PRESETS, offered

    implementations = ", ".join(IMPLEMENTATIONS)
    given = {
        "--preset": (presets, offered(), f"{', '.join(PRESETS)}, or a workload that --list names"),
        "--implementation": (names, IMPLEMENTATIONS, implementations),
        "--baseline": ((baseline,), IMPLEMENTATIONS, implementations),
    }
    return [
        f"{option}: expected one of {said}, got {', '.join(strange)}"
        for option, (asked, known, said) in given.items()
        if (strange := [name for name in asked if name not in known])
    ]


def without_mode(presets, modes) -> Iterator[str]:
    """A line where a mode is asked for that none of the workloads has."""
    from jax_attn.bench.presets import chosen, offered

    had = {mode for w in chosen([p for p in presets if p in offered()]) for mode in w.modes}
    strange = ", ".join(mode for mode in modes if mode not in had)
    if had and strange:
        said = " or ".join(mode for mode in PRESET_OF if mode in had)
        yield f"--mode: expected {said}, which {', '.join(presets)} has, got {strange}"


def too_many(threads: int | None) -> Iterator[str]:
    from jax_attn.bench.engine.worker import usable_cores

    cores = usable_cores()
    if threads is not None and threads > cores:
        yield f"--threads: expected at most {cores}, the cores here, got {threads}"


def unwritable(directories: dict[str, Path | None]) -> Iterator[str]:
    """A line for each option whose directory could not be made or written to after the run."""
    for option, directory in directories.items():
        if directory is None:
            continue
        here = next(p for p in (directory, *directory.absolute().parents) if os.path.exists(p))
        if not here.is_dir():
            yield f"{option}: expected a directory, got {here}"
        elif not os.access(here, os.W_OK | os.X_OK):
            yield f"{option}: expected a directory that can be written to, got {here}"


def measured(given, modes, names, baseline, rounds, threads, device):
    """(record of a run, what ended it early or None), with a progress bar on stderr."""
    from jax_attn.bench.engine.rounds import Limits
    from jax_attn.bench.engine.session import Session, SessionPlan
    from jax_attn.bench.engine.worker import usable_cores
    from jax_attn.bench.implementations import IMPLEMENTATIONS
    from jax_attn.cli.progress import counted

    cores = usable_cores()
    plan = SessionPlan(
        given,
        names or tuple(n for n, i in IMPLEMENTATIONS.items() if device in i.devices),
        threads or cores,
        modes,
        baseline,
        device,
        Limits.of(rounds),
    )
    if (load := os.getloadavg()[0]) > 0.5 * cores:
        click.echo(f"Warning: the machine is busy: load {load:.1f} on {cores} cores", err=True)
    with Session(plan) as session:
        with closing(session.run()) as steps:
            ended_by = taken(counted(steps, session.steps))
        return session.record(interrupted=ended_by is not None), ended_by


def with_compiled(record, given, modes):
    """(the record with what the TPU's compiler says, what ended that early or None)."""
    found = []

    def steps() -> Iterator[None]:
        from jax_attn.bench.engine.tpu_compiler import compiled_for_tpu

        yield from map(found.append, compiled_for_tpu(given, modes))

    ended_by = taken(steps())
    return replace(record, compiled=tuple(found), interrupted=ended_by is not None), ended_by


def taken(steps: Iterable) -> BaseException | None:
    """Take every step; what ended them early, so that what they gave can be kept first."""
    try:
        for _ in steps:
            pass
    except (Exception, KeyboardInterrupt) as error:
        ignore_interrupts()
        said = "" if isinstance(error, KeyboardInterrupt) else f" by {type(error).__name__}"
        click.echo(f"interrupted{said}: what was measured until now follows", err=True)
        return error
    return None


def asked(presets, modes, dtype) -> tuple[tuple, tuple[str, ...]]:
    """The workloads, and the modes in their order: all of them unless given.

    What has none of the modes is left out.
    """
    from jax_attn.bench.presets import chosen

    modes = tuple(mode for mode in PRESET_OF if mode in (modes or PRESET_OF))
    given = tuple(w for w in chosen(presets, dtype) if not set(modes).isdisjoint(w.modes))
    return given, modes


def ignore_interrupts() -> None:
    """Until the command ends: a second Ctrl-C must not lose what the first one kept."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    click.get_current_context().call_on_close(lambda: signal.signal(signal.SIGINT, before))


def show(record, as_json: bool, as_markdown: bool, plots: Path | None, output: Path | None) -> None:
    """Print the record, and write what was asked for."""
    from jax_attn.bench.results import table
    from jax_attn.parity.judge.text import console
    from jax_attn.report import results

    if output is not None:
        results.write(output.parent, {output.name: record.to_json()})
    if as_json:
        click.echo(record.to_json())
    elif as_markdown:
        click.echo(table.markdown(record))
    else:
        console().print(table.terminal(record))
    if plots is not None:
        from jax_attn.bench.results.plot import draw

        drawn = draw(record, plots)
        for path in drawn:
            click.echo(f"drawn: {path}", err=True)
        if not drawn:
            click.echo("drawn: nothing, as no time forward or backward was measured", err=True)


def status(record) -> Exit:
    from jax_attn.bench.record import Status
    from jax_attn.parity.judge.compare import Verdict

    if record.interrupted:
        return Exit.INTERRUPTED
    if any(row.status in (Status.EXCLUDED, Status.FAILED) for row in record.rows):
        return Exit.FAIL
    doubtful = any(row.verdict == Verdict.INCONCLUSIVE for row in record.rows)
    timed = [row for row in record.rows if row.seconds]
    compared = timed and all(row.ratio for row in timed)
    return Exit.PASS if compared and not doubtful else Exit.INCONCLUSIVE
