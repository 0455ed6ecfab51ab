"""`jax-attn verify`: the built-in matrix, or the attention layers of a checkpoint."""

import sys
from collections.abc import Iterable
from pathlib import Path

import click

from jax_attn.cli import devices
from jax_attn.cli.outcome import expect_writable
from jax_attn.cli.status import Exit, expect_installed, missing
from jax_attn.cli.verify_checkpoint import expect_torch_side
from jax_attn.cli.verify_modes import NONE_LEFT, expected_mode
from jax_attn.dtypes import DTYPES
from jax_attn.environment import settle_platforms

BACKENDS = (*devices.KINDS, "all")


@click.command("verify")
@click.pass_context
@click.argument("checkpoint", required=False, type=click.Path(path_type=Path))
@click.option("--design", "designs", multiple=True, help="Only this design; may be repeated.")
@click.option("--dtype", "dtypes", multiple=True, help="Only this dtype; may be repeated.")
@click.option(
    "--backend",
    type=click.Choice(BACKENDS),
    default="all",
    show_default=True,
    help="Where the port runs; all: wherever it can here.",
)
@click.option("--implementation", help="The attention kernel to insist on; chosen unless given.")
@click.option("-k", "pattern", default="", help="Only cases whose name has this in it.")
@click.option(
    "--report",
    type=click.Path(path_type=Path, file_okay=False),
    help="Write result.json and summary.md, power.json or calibration.json into this directory.",
)
@click.option("--json", "as_json", is_flag=True, help="The whole result as JSON on stdout.")
@click.option("--power", is_flag=True, help="Plant bugs instead: which rows kill which.")
@click.option("--calibrate", is_flag=True, help="Only correct ports, drawn at random: none fails.")
@click.option(
    "--configurations",
    type=click.IntRange(min=1),
    default=10_000,
    show_default=True,
    help="How many --calibrate draws.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Of what --calibrate draws.")
@click.option("--num-heads", type=int, help="Query heads, where no config beside says.")
@click.option("--num-kv-heads", type=int, help="Key/value heads, where no config beside says.")
def command(
    context: click.Context,
    checkpoint: Path | None,
    designs: tuple[str, ...],
    dtypes: tuple[str, ...],
    backend: str,
    implementation: str | None,
    pattern: str,
    report: Path | None,
    as_json: bool,
    power: bool,
    calibrate: bool,
    configurations: int,
    seed: int,
    num_heads: int | None,
    num_kv_heads: int | None,
) -> None:
    """Verify that port and reference agree.

    Without CHECKPOINT: every published design, in both frameworks, against a float64 oracle.
    With one (a safetensors or torch file, or a folder of shards): the attention layers found in
    it, each rebuilt in torch and in Flax and compared on seeded inputs.

    With --power no port is run: planted port bugs are, and each must be killed by every row that
    claims it; where no row is left out, each on the row made for it, too. With --calibrate correct
    ports alone are, drawn at random: none may fail, and no more than a tenth be inconclusive.
    """
    mode = expected_mode(context)
    if checkpoint:
        expect_torch_side(checkpoint)
    expect_installed("torch", "is the reference", "torch")
    expect_writable("--report", report, mode.files)
    settle_platforms()
    if calibrate:
        from jax_attn.cli.calibrate import verify_calibration
        from jax_attn.parity.calibration import configurations as programs

        expect_known("--dtype", dtypes, DTYPES)
        chosen_ones = programs.configurations(configurations, seed, dtypes, pattern)
        if not chosen_ones:
            raise click.UsageError(NONE_LEFT)
        sys.exit(verify_calibration(chosen_ones, seed=seed, report=report, as_json=as_json))
    if power:
        from jax_attn.cli.power import verify_power
        from jax_attn.parity.training.bugs import trials

        rows = selected(designs, dtypes, pattern)
        beside = [] if designs else trials.selected(dtypes, pattern)
        whole = not (designs or dtypes or pattern)
        sys.exit(verify_power(rows, beside, whole=whole, report=report, as_json=as_json))
    if checkpoint:
        from jax_attn.cli.verify_checkpoint import verify_checkpoint

        outcome = verify_checkpoint(checkpoint, num_heads, num_kv_heads)
    else:
        outcome = verify_matrix(designs, dtypes, backend, pattern, implementation)
    sys.exit(present_outcome(*outcome, report=report, as_json=as_json))


def verify_matrix(designs, dtypes, backend, pattern, implementation=None):
    """(results, compiled) of the chosen rows, with a progress bar on stderr."""
    work, rows = chosen(designs, dtypes, backend, pattern, implementation)

    from jax_attn.cli.progress import tracked
    from jax_attn.parity import process_pool
    from jax_attn.parity.judge.not_run import NotRun

    # Processes would each take the whole of a GPU or a TPU.
    processes = None if devices.available() <= {"cpu"} else 1
    found = tracked(process_pool.run(work, processes), process_pool.size(work))
    order = {case.name: i for i, case in enumerate(c for chosen in rows.values() for c in chosen)}
    results = sorted((r for r in found if not isinstance(r, NotRun)), key=lambda r: order[r.name])
    compiled = [r for r in found if isinstance(r, NotRun)]
    return results, sorted(compiled, key=lambda c: (c.design, c.direction))


def chosen(designs, dtypes, backend, pattern, implementation):
    """The work that the filters leave, and the cases by backend."""
    from jax_attn.attention.dispatch import KERNELS
    from jax_attn.parity import process_pool
    from jax_attn.parity.matrix import cases

    if implementation is not None:
        expect_known("--implementation", (implementation,), KERNELS)
    measured = selected(designs, dtypes, pattern)
    emulated = selected(designs, dtypes, pattern, cases.emulated())
    here = devices.available()
    asked = [b for b in devices.KINDS if backend in (b, "all")]
    if backend == "gpu":
        devices.expect_gpu()
    if backend == "cpu" and "cpu" not in here:
        missing("jax was told to leave the CPU out: add cpu to JAX_PLATFORMS")
    rows = {b: measured for b in asked if b in here}
    work = [
        task
        for b, chosen in rows.items()
        for task in process_pool.tasks(chosen, b, (), implementation)
    ]
    if "tpu" in asked and "tpu" not in here:
        rows["tpu"] = emulated
        compiled = tuple(d for d in cases.published() if not designs or d in designs)
        # What is compiled is no case: a filter on cases leaves it out.
        compiled = () if pattern or dtypes or implementation else compiled
        compiled += cases.COMPILED_KERNELS if compiled and not designs else ()
        work += process_pool.tasks(rows["tpu"], "tpu", compiled, implementation)
    if not any(rows.values()):
        raise click.UsageError(NONE_LEFT)
    return work, rows


def selected(designs, dtypes, pattern, cases=None):
    """The cases that the filters leave, of the built-in matrix unless given."""
    from jax_attn.parity.matrix.cases import FACTORS, matrix

    expect_known("--design", designs, dict.fromkeys(d.partition("/")[0] for d in FACTORS))
    expect_known("--dtype", dtypes, DTYPES)
    return [
        case
        for case in (matrix() if cases is None else cases)
        if (not designs or case.family in designs)
        and (not dtypes or case.dtype in dtypes)
        and pattern in case.name
    ]


def expect_known(option: str, given: Iterable[str], names: Iterable[str]) -> None:
    """Raises UsageError for what is not among the names."""
    names = list(names)
    if unknown := sorted(set(given) - set(names)):
        raise click.UsageError(
            f"{option}: expected one of {', '.join(names)}, got {', '.join(unknown)}"
        )


def present_outcome(results, compiled, *, report: Path | None, as_json: bool) -> Exit:
    """Print, write, and return the exit status."""
    from jax_attn import environment
    from jax_attn.cli.outcome import tell
    from jax_attn.parity.judge.compare import Verdict
    from jax_attn.report.documents import result_files
    from jax_attn.report.summary import summary_lines
    from jax_attn.report.tables import cases_table, compiled_table

    files = result_files(results, environment.describe(), compiled)
    tell(
        files["result.json"],
        [
            cases_table(results),
            *([compiled_table(compiled)] if compiled else []),
            *(r for r in results if r.verdict is not Verdict.PASS),
            *summary_lines(results, compiled),
        ],
        files=files,
        report=report,
        as_json=as_json,
    )
    if any(item.level == "failed" for item in compiled):
        return Exit.FAIL
    return Exit[Verdict.worst(r.verdict for r in results)]
