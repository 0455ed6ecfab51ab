"""`jax-attn verify`: the built-in matrix, or the model in a checkpoint."""

import sys
from functools import partial
from pathlib import Path

import click

from jax_attn.cli import calibrate as calibrate_command
from jax_attn.cli import power as power_command
from jax_attn.cli.common import devices
from jax_attn.cli.common.selection import (
    AS_JSON,
    CONFIGURATIONS,
    DESIGN,
    DTYPE,
    PATTERN,
    REPORT,
    SEED,
    expect_ready,
    numbers,
)
from jax_attn.cli.verifying.checkpoint import Scope, expect_torch_side, verify_checkpoint
from jax_attn.cli.verifying.matrix import verify_matrix
from jax_attn.cli.verifying.mesh import Sizes, mesh_sizes, verify_on_mesh
from jax_attn.cli.verifying.modes import expect_one_mode
from jax_attn.report.files import RESULT_FILES

BACKENDS = (*devices.KINDS, "all")


@click.command("verify")
@click.pass_context
@click.argument("checkpoint", required=False, type=click.Path(path_type=Path))
@click.option(
    "--all", "every_row", is_flag=True, help="Run every case of the matrix, which takes minutes."
)
@DESIGN
@DTYPE
@click.option(
    "--backend",
    type=click.Choice(BACKENDS),
    default="all",
    show_default=True,
    help="Run the port on this backend; all runs it on every available backend.",
)
@click.option(
    "--implementation", help="Use this attention kernel. The default is chosen by platform."
)
@click.option(
    "--mesh",
    "sizes",
    metavar="data=2,heads=4",
    callback=mesh_sizes,
    help="Run the port on a mesh with these numbers of devices along the batch and the heads. The "
    "kernel is blocked unless --implementation names another. The devices are virtual CPU devices "
    "unless --backend names another kind.",
)
@PATTERN
@REPORT
@AS_JSON
@click.option(
    "--all-tensors",
    is_flag=True,
    help="List every tensor of a case that does not pass, not only the worst ten.",
)
@click.option(
    "--explain",
    is_flag=True,
    help="Say why CHECKPOINT does not pass: the first wrong tensor, and the cause.",
)
@click.option(
    "--model",
    is_flag=True,
    help="Verify the whole model of CHECKPOINT in jax_attn.models, or fail. Without this option, a "
    "model that jax_attn.models does not support is translated, and the translation verified.",
)
@click.option(
    "--layers",
    metavar="0,5,…",
    callback=numbers,
    help="Verify these layers of the model in CHECKPOINT, each read and compared on its own.",
)
@click.option(
    "--attention",
    is_flag=True,
    help="Verify only the attention layers of CHECKPOINT, rebuilt without transformers.",
)
@click.option("--power", is_flag=True, help="Run `jax-attn power` instead.")
@click.option("--calibrate", is_flag=True, help="Run `jax-attn calibrate` instead.")
@CONFIGURATIONS
@SEED
@click.option(
    "--num-heads",
    type=click.IntRange(1),
    help="The number of query heads, if config.json does not give it.",
)
@click.option(
    "--num-kv-heads",
    type=click.IntRange(1),
    help="The number of key/value heads, if config.json does not give it.",
)
def command(
    context: click.Context,
    checkpoint: Path | None,
    every_row: bool,
    designs: tuple[str, ...],
    dtypes: tuple[str, ...],
    backend: str,
    implementation: str | None,
    sizes: Sizes | None,
    pattern: str,
    report: Path | None,
    as_json: bool,
    all_tensors: bool,
    explain: bool,
    model: bool,
    layers: tuple[int, ...],
    attention: bool,
    power: bool,
    calibrate: bool,
    configurations: int,
    seed: int,
    num_heads: int | None,
    num_kv_heads: int | None,
) -> None:
    """Verify that port and reference agree.

    Without CHECKPOINT, verify every published design in both frameworks against a float64 oracle.
    The default cases are few, but they contain every variant, and every pair of settings (design,
    dtype, mask, shape, transform) that can occur together; --all also runs the other combinations.

    With --mesh, run the ports on a mesh of devices, once with Auto and once with Explicit axes.
    Compare each case, also after a training step, with the oracle and with the port on one device,
    and check its communication and the memory on each device against the theoretical amounts.

    With CHECKPOINT (a safetensors or torch file, or a folder of shards), load its model in
    transformers and in jax_attn.models, and compare the last hidden states, logits and the gradient
    of every parameter, in float32 and bfloat16. A model that does not fit into memory is verified
    layer by layer with --layers. A model that jax_attn.models does not support is translated, as by
    `jax-attn translate`, and the translation compared, whole, in float32. If that is not possible,
    or with --attention, find the attention layers, rebuild each in torch and in Flax, and compare
    the two; this verifies the attention weights, not masks such as causality nor the whole model.
    """
    expect_one_mode(context)
    shared = {"dtypes": dtypes, "pattern": pattern, "report": report, "as_json": as_json}
    if power:
        context.invoke(power_command.command, designs=designs, **shared)
    if calibrate:
        drawn = {"configurations": configurations, "seed": seed}
        context.invoke(calibrate_command.command, **drawn, **shared)
    if checkpoint:
        expect_torch_side(checkpoint)
    expect_ready(report, RESULT_FILES)
    if checkpoint:
        scope = Scope(model, layers, attention, num_heads, num_kv_heads)
        outcome = verify_checkpoint(checkpoint, scope, explain=explain, shown=not as_json)
    else:
        filters = designs, dtypes, pattern
        verify = verify_matrix if sizes is None else partial(verify_on_mesh, sizes=sizes)
        outcome = verify(filters, backend, implementation, every_row=every_row, shown=not as_json)
    status = outcome.present(report=report, as_json=as_json, all_tensors=all_tensors)
    if outcome.interrupted:
        raise outcome.interrupted
    sys.exit(status)
