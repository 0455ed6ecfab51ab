"""`jax-attn translate`: the source of an NNX module, its weights and proof, of a torch module."""

import json
import shlex
import sys
from dataclasses import asdict
from pathlib import Path

import click

from jax_attn.cli.checking.request import Judged, refuse, stdout_is_stderr
from jax_attn.cli.checking.shown import Forms
from jax_attn.cli.status import Exit, expect_installed, missing
from jax_attn.cli.status import refuse as refuse_transfer
from jax_attn.cli.translate_job import Axes, TranslateJob, is_checkpoint
from jax_attn.environment import settle_platforms
from jax_attn.parity.pair.errors import PairError
from jax_attn.transfer import TransferError


def _axes(context: click.Context, option: click.Parameter, values: tuple[str, ...]) -> Axes:
    """Parse `input_ids=B,T`, as a callback."""
    found: Axes = {}
    for value in values:
        name, _, sizes = value.partition("=")
        named = {axis: size for axis, size in enumerate(sizes.split(",")) if size != "-"}
        wrong = [size for size in named.values() if not size.isidentifier()]
        if not name or not sizes or wrong:
            raise click.BadParameter(
                "expected an input and a name for each axis, - for a fixed one, such as "
                f"input_ids=B,T, got {value!r}"
            )
        found[name] = named
    return found


@click.command("translate")
@click.argument("named", metavar="FILE.py:FUNCTION|CHECKPOINT")
@click.argument("out", metavar="OUT", type=click.Path(path_type=Path))
@click.option(
    "--dynamic",
    multiple=True,
    metavar="INPUT=B,T,...",
    callback=_axes,
    help="The sizes of this input that vary, by the names of its axes in order, - for a fixed one; "
    "may be repeated. Axes with the same name have the same size. Without it, no size of a "
    "function's inputs varies, and of a checkpoint's the number of rows and their lengths, as far "
    "as the model allows it.",
)
@click.option(
    "--part",
    metavar="MODULE",
    help="Translate this module of CHECKPOINT's model, such as text_model or encoder.",
)
@click.option(
    "--partial",
    is_flag=True,
    help="Write the folder although operators have no translation; model.py raises there, and "
    "nothing is compared. The exit status is 2.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the whole result as JSON.")
def command(
    named: str, out: Path, dynamic: Axes, part: str | None, partial: bool, as_json: bool
) -> None:
    """Translate a PyTorch module into the source of an NNX module, and prove it.

    FUNCTION, in a file or as package.module:FUNCTION, needs no arguments. It returns (torch
    module, inputs), or a parity.Pair whose port is None. The inputs are NumPy arrays, a tuple or a
    dict. CHECKPOINT is a folder with a config.json, as transformers and diffusers write it; its
    inputs are made. OUT is a folder that does not exist yet. It receives model.py, which
    imports jax and flax alone, weights.safetensors, README.md and the report of the check.

    The verdict compares outputs and every gradient with the reference in float64, eager and
    jitted, within the rounding of float32; also at other sizes, if sizes vary. A FAIL is
    explained. The folder is written whatever the verdict is. Where the module's own code reads
    `training`, training mode is translated and compared too, or a note tells why it cannot be.

    Exit status: 0 for PASS, 1 for FAIL, 2 if the module cannot be translated, or not in whole, 3 if
    a package is missing or memory runs out, 4 for INCONCLUSIVE.
    """
    if part is not None and not is_checkpoint(named):
        raise click.UsageError("--part needs a CHECKPOINT; a function returns the part itself")
    expect_installed("torch", "is the reference", "torch")
    settle_platforms()
    words = [f"--dynamic={name}={_spelled(axes)}" for name, axes in dynamic.items()]
    words += [] if part is None else [f"--part={part}"]
    line = shlex.join(["jax-attn", "translate", named, str(out), *words])
    try:
        with stdout_is_stderr():
            done = TranslateJob(named, out, dynamic, part, partial).done()
    except TransferError as error:
        refuse_transfer(error)
    except PairError as error:
        refuse(error)
    except MemoryError as error:
        missing(f"not enough memory: {error}")
    if not isinstance(done, Judged):
        if as_json:
            click.echo(json.dumps({"unsupported": [asdict(each) for each in done]}, indent=1))
        for each in () if as_json else done:
            click.echo(f"- {each}")
        click.echo(f"{out} holds a partial translation, of which nothing is compared", err=True)
        sys.exit(Exit.USAGE)
    Forms(None, as_json=as_json, all_tensors=False).show(done, line)
    click.echo(f"{done.result.verdict}: {out} holds the translation", err=as_json)
    sys.exit(Exit[done.result.verdict])


def _spelled(axes: dict[int, str]) -> str:
    return ",".join(axes.get(axis, "-") for axis in range(max(axes, default=-1) + 1))
