"""`jax-attn bench`: time all implementations side by side, each only where it agrees."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from jax_attn.bench.implementations import (
    EAGER,
    IMPLEMENTATIONS,
    OF_PRESETS,
    REFERENCE,
    WAYS,
    by_default,
)
from jax_attn.bench.presets import PRESET_OF, PRESETS, select, selectable
from jax_attn.bench.workload import CACHED, DTYPES, PAIR_MODES
from jax_attn.cli.bench_compare import command as compare
from jax_attn.cli.common.devices import expect_gpu
from jax_attn.cli.common.selection import FolderName, numbers
from jax_attn.cli.status import WrongInput, expect_installed
from jax_attn.environment import settle_platforms
from jax_attn.parity.pair.errors import PairError

MODES = (*PAIR_MODES, *CACHED)
_FETCH = "`hf download org/model --local-dir FOLDER` downloads one"


def _lengths(ctx: click.Context, option: click.Parameter, value: str | None) -> tuple[int, ...]:
    """Parse `--lengths 128,512`, as a callback of click. Raises BadParameter."""
    lengths = numbers(ctx, option, value)
    if 0 in lengths:
        raise click.BadParameter(f"expected lengths of at least 1, got {value!r}")
    return lengths


class _Bench(click.Group):
    """A group whose first argument may also be a checkpoint, with options before and after it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] in self.commands:
            # There is no checkpoint; the remaining arguments belong to the subcommand.
            return super().parse_args(ctx, ["", *args])
        ctx.allow_interspersed_args = True
        return super().parse_args(ctx, args)


@click.group("bench", cls=_Bench, invoke_without_command=True)
@click.pass_context
@click.argument("checkpoint", required=False)
@click.option(
    "--preset",
    "presets",
    multiple=True,
    help="Measure this preset or workload; may be repeated. The default is quick, or the preset "
    "named after the mode.",
)
@click.option(
    "--pair",
    metavar="FILE.py:FUNCTION",
    help="Measure your own pair: the function returns (torch module, port, inputs) or a "
    "parity.Pair, as for `jax-attn check`.",
)
@click.option(
    "--lengths",
    callback=_lengths,
    metavar="128,512,...",
    help="Measure a checkpoint or a pair at these lengths; the pair's function takes each as its "
    "argument `length`.",
)
@click.option(
    "--untrusted", is_flag=True, help="Also time a pair whose port disagrees with its reference."
)
@click.option(
    "--implementation",
    "names",
    multiple=True,
    help="Measure only this implementation, or this way to run a pair; may be repeated.",
)
@click.option(
    "--mode",
    "modes",
    multiple=True,
    type=click.Choice(MODES),
    help="Measure only this mode; may be repeated. With a cache, prefill reads many tokens and "
    "decode reads one; training-step needs a pair or a checkpoint.",
)
@click.option(
    "--baseline",
    help="Compare times with this implementation's. The default is sdpa, or torch eager for a pair "
    "or a checkpoint.",
)
@click.option(
    "--rounds",
    type=click.IntRange(1),
    help="Run exactly this many rounds. The default is 7 to 21, fewer for slow calls.",
)
@click.option(
    "--threads",
    type=click.IntRange(1),
    help="Use this many threads, each on its own core. The default is all cores.",
)
@click.option("--dtype", type=click.Choice(DTYPES), default="float32", show_default=True)
@click.option("--device", type=click.Choice(["cpu", "gpu"]), default="cpu", show_default=True)
@click.option(
    "--tpu", is_flag=True, help="Also print the TPU compiler's figures for jax-attn's programs."
)
@click.option("--json", "as_json", is_flag=True, help="Print the whole record as JSON on stdout.")
@click.option("--markdown", "as_markdown", is_flag=True, help="Print Markdown tables on stdout.")
@click.option("--csv", "as_csv", is_flag=True, help="Print the measurements as CSV, one per line.")
@click.option(
    "--plot",
    "plots",
    type=FolderName(),
    help="Draw time, memory and roofline into this directory, as SVG and PNG.",
)
@click.option(
    "--report",
    "reports",
    type=FolderName(),
    help="Write the record, a summary and a page with its plots into this directory: result.json, "
    "summary.md, index.html.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the record to this file, as JSON.",
)
@click.option(
    "--list",
    "listing",
    is_flag=True,
    help="List the presets and the implementations, with how to install those that are missing.",
)
def command(
    context: click.Context,
    checkpoint: str | None,
    presets: tuple[str, ...],
    pair: str | None,
    lengths: tuple[int, ...],
    untrusted: bool,
    names: tuple[str, ...],
    modes: tuple[str, ...],
    baseline: str | None,
    rounds: int | None,
    threads: int | None,
    dtype: str,
    device: str,
    tpu: bool,
    as_json: bool,
    as_markdown: bool,
    as_csv: bool,
    plots: Path | None,
    reports: Path | None,
    output: Path | None,
    listing: bool,
) -> None:
    """Time attention in PyTorch and JAX side by side, or the model of CHECKPOINT, or your own pair
    (--pair).

    CHECKPOINT is a folder, or a file in one, of a family that jax_attn.models supports. A prompt, a
    decode step over its cache and a training step are timed in transformers and in jax_attn.models.

    Each implementation is first judged against float64; one that disagrees is excluded. The
    others run in processes of their own, in interleaved rounds, with the same number of threads.
    Ctrl-C ends the run and keeps what was measured.

    Exit status: 1 if an implementation is excluded or fails; 4 if one could not be judged, if
    nothing was timed or if the baseline has no time; 130 if the run was interrupted.
    """
    if context.invoked_subcommand is not None:
        return
    if listing:
        click.echo(catalogue())
        return
    named = pair or checkpoint
    baseline = baseline or (EAGER if named else REFERENCE)
    known = WAYS if named else OF_PRESETS
    if not named:
        by_mode = tuple(dict.fromkeys(PRESET_OF.get(mode, "quick") for mode in modes))
        presets = presets or by_mode or ("quick",)
    wrong = [*problems_of_names(known, names, baseline)]
    if named:
        fixed = {"--preset": presets, "--tpu": tpu, "--dtype": dtype != "float32"}
        if given := [option for option, is_given in fixed.items() if is_given]:
            wrong += [f"{', '.join(given)}: cannot be combined with --pair or a checkpoint"]
        if pair and checkpoint:
            wrong += [f"--pair: expected without a checkpoint, got {checkpoint}"]
        elif checkpoint and not Path(checkpoint).exists():
            wrong += [f"CHECKPOINT: expected a folder or a file, got {checkpoint}; {_FETCH}"]
    else:
        wrong += problems_of_presets(presets, modes)
        alone = {"--untrusted": untrusted, "--lengths": lengths}
        wrong += [f"{o}: needs --pair or a checkpoint" for o, is_ in alone.items() if is_]
    wrong += [*problems_of_threads(threads), *problems_of_directories(plots, reports, output)]
    forms = {"--json": as_json, "--markdown": as_markdown, "--csv": as_csv}
    if len(asked := [option for option, is_asked in forms.items() if is_asked]) > 1:
        wrong.insert(0, f"{', '.join(forms)}: expected one of them, got {', '.join(asked)}")
    if wrong:
        raise click.UsageError("\n".join(wrong))
    expect_installed("torch", "is the baseline", "torch")
    if plots is not None:
        expect_installed("matplotlib", "--plot draws with it", "bench")
    settle_platforms()
    if device == "gpu":
        expect_gpu()

    from jax_attn.bench.engine.plan import BenchPlan
    from jax_attn.bench.engine.rounds import Limits
    from jax_attn.bench.engine.worker import usable_cores
    from jax_attn.cli import bench_job

    chosen = tuple(mode for mode in MODES if mode in modes)
    measured: dict[str, Any] = {"modes": chosen, "lengths": lengths, "untrusted": untrusted}
    if not named:
        of_modes = {*(chosen or MODES)}
        workloads = (w for w in select(presets, dtype) if not of_modes.isdisjoint(w.modes))
        measured |= {"workloads": tuple(workloads), "modes": chosen or MODES}
    plan = BenchPlan(
        names or by_default(known, device),
        threads or usable_cores(),
        pair=named,
        baseline=baseline,
        device=device,
        limits=Limits.of(rounds),
        **measured,
    )
    try:
        record, ended_by = bench_job.run(plan, tpu=tpu)
    except PairError as error:
        raise WrongInput(f"{'--pair' if pair else 'CHECKPOINT'}: {error}") from error
    bench_job.show(record, "".join(asked), plots, reports, output)
    if isinstance(ended_by, Exception):
        raise ended_by
    sys.exit(bench_job.status(record))


command.add_command(compare)


def catalogue() -> str:
    """Return the text of `--list`: a line for each preset and each implementation."""
    lines = ["presets"]
    lines += [f"  {name:20} {', '.join(w.name for w in PRESETS[name])}" for name in PRESETS]
    lines += ["implementations"]
    for i in map(IMPLEMENTATIONS.__getitem__, OF_PRESETS):
        where = "" if "cpu" in i.devices else ", with --device gpu or by name"
        lines.append(f"  {i.name:20} {i.absent or i.framework + where}")
    return "\n".join(lines)


def problems_of_names(
    known: tuple[str, ...], names: tuple[str, ...], baseline: str
) -> Iterator[str]:
    """Yield which of the implementations is not among the known ones, one line for each option."""
    for option, values in (("--implementation", names), ("--baseline", (baseline,))):
        if unknown := [value for value in values if value not in known]:
            yield f"{option}: expected one of {', '.join(known)}, got {', '.join(unknown)}"


def problems_of_presets(presets: tuple[str, ...], modes: tuple[str, ...]) -> Iterator[str]:
    """Yield everything that is wrong with the choice of presets, one line each."""
    known = selectable()
    if unknown := [name for name in presets if name not in known]:
        expected = f"{', '.join(PRESETS)}, or a workload that --list names"
        yield f"--preset: expected one of {expected}, got {', '.join(unknown)}"
    served = {mode for workload in select(known.keys() & presets) for mode in workload.modes}
    unserved = ", ".join(mode for mode in modes if mode not in served)
    if served and unserved:
        expected = " or ".join(mode for mode in MODES if mode in served)
        yield f"--mode: expected {expected}, which {', '.join(presets)} has, got {unserved}"


def problems_of_threads(threads: int | None) -> Iterator[str]:
    from jax_attn.bench.engine.worker import usable_cores

    cores = usable_cores()
    if threads is not None and threads > cores:
        yield f"--threads: expected at most {cores}, the number of usable cores, got {threads}"


def problems_of_directories(
    plots: Path | None, reports: Path | None, output: Path | None
) -> Iterator[str]:
    """Yield why the directories of these options cannot be written to."""
    from jax_attn.report.files import RESULT_FILES, why_not_writable

    for option, directory, names in (
        ("--plot", plots, ()),
        ("--report", reports, RESULT_FILES),
        ("--output", output and output.parent, (output.name,) if output else ()),
    ):
        if directory and (why := why_not_writable(directory, names)):
            yield f"{option}: expected a directory to write to, got {directory}: {why}"
