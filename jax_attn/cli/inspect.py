"""`jax-attn inspect`: describe a checkpoint from its headers and its config."""

import json
import os
import shlex
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.text import Text
from rich.tree import Tree

from jax_attn.cli.common.held import Held, held_options
from jax_attn.cli.status import refuse
from jax_attn.cli.verifying.checkpoint import expect_torch_side

if TYPE_CHECKING:
    from jax_attn.porting.inspect.contents import Attention, Contents


@click.command("inspect")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout.")
@click.option(
    "--table",
    "target",
    metavar="FILE.py",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write a starting table for `port --layout` to this file, with questions that names and "
    "shapes do not answer.",
)
@held_options
def command(
    checkpoint: Path, as_json: bool, target: Path | None, part: str | None, strip: str
) -> None:
    """Describe a checkpoint: family, layers, heads, dtypes, ties.

    CHECKPOINT is a file or a folder, with its config.json. No tensor is read, and no framework is
    imported, except torch if the file is a torch pickle.
    """
    from jax_attn.porting.inspect.contents import inspect
    from jax_attn.porting.inspect.starting_table import starting_table
    from jax_attn.report.files import write
    from jax_attn.transfer import TransferError, load_checkpoint
    from jax_attn.transfer.arrays import specs
    from jax_attn.transfer.files.port_folder import read_config
    from jax_attn.transfer.files.prefixes import stripped, unwrapped

    held = Held(part, strip)
    if as_json and target is not None:
        raise click.UsageError("--json, --table: expected one of them, got both")
    if target is not None:
        _expect_new(target)
    expect_torch_side(checkpoint)
    try:
        with load_checkpoint(checkpoint, part=part) as tensors:
            bare, problems = stripped(tensors, strip)
            if problems:
                raise TransferError("inspect", problems)
            plain, wrapped = unwrapped(bare)
            described, unreadable = specs(plain)
            config, ties = read_config(checkpoint), plain.tied()
            if target is not None:
                if unreadable:
                    raise TransferError("inspect wrote no table", unreadable)
                for problem in wrapped:
                    click.echo(problem, err=True)
                table = starting_table(described, config or {}, ties, checkpoint.name, held.options)
                write(target.parent, {target.name: table.text})
                asked = f"{table.questions} question{'s' * (table.questions != 1)}"
                click.echo(f"written: {target}, with {asked} to answer")
                return
            contents = inspect(described, config, ties, unreadable)
    except TransferError as error:
        refuse(error)
    contents.notes.extend(str(problem) for problem in (*wrapped, *unreadable))
    if tensors.left_out:
        files = ", ".join(tensors.left_out)
        contents.notes.append(f"left out, as transformers reads {tensors.path.name} only: {files}")
    if as_json:
        click.echo(json.dumps({"path": str(checkpoint), **asdict(contents)}, indent=1))
        return
    _print(checkpoint, contents, held)


def _expect_new(target: Path) -> None:
    """Raise UsageError if the file exists, since it may hold answers, or cannot be written."""
    from jax_attn.report.files import why_not_writable

    if os.path.lexists(target):
        text = "expected a file that does not exist yet, since an existing one may hold answers"
        raise click.UsageError(f"--table: {text}, got {target}")
    if why := why_not_writable(target.parent, ()):
        raise click.UsageError(f"--table: cannot write into {target.parent}: {why}")


def _print(checkpoint: Path, contents: "Contents", held: Held) -> None:
    from jax_attn.parity.judge.text import console

    named = contents.family or "family unknown"
    kind = f" ({contents.model_type})" if contents.model_type else ""
    tree = Tree(_text(f"{checkpoint}: {named}{kind}, {contents.layers} layers"))
    dtypes = ", ".join(
        f"{name}: {held['tensors']} tensors, {held['bytes']:,} bytes"
        for name, held in contents.dtypes.items()
    )
    tree.add(_text(f"{contents.tensors} tensors, {contents.bytes:,} bytes ({dtypes})"))
    for attention in contents.attention or ():
        first, *others = attention.places
        where = f"{first} … {others[-1]}, {len(others) + 1} alike" if others else first
        branch = tree.add(_text(where))
        for line in _lines(attention):
            branch.add(_text(line))
    if not contents.attention:
        tree.add("no attention found")
    if (experts := contents.experts) is not None:
        tree.add(f"experts: {experts['number']} a layer, {experts['chosen']} for each token")
    if contents.has_model:
        call = f"jax_attn.models.load({str(checkpoint)!r}{held.arguments})"
        tree.add(_text(f"a whole model: {call}"))
    if contents.family is None:
        table = f"jax-attn inspect {shlex.quote(str(checkpoint))}{held.options} --table table.py"
        tree.add(_text(f"a starting table for port: {table}"))
    for key, same in contents.tied.items():
        tree.add(_text(f"tied: {key} is {same}"))
    for note in contents.notes:
        tree.add(_text(note))
    console().print(tree)


def _text(lines: str) -> Text:
    from jax_attn.transfer.problems import printable

    return Text("\n".join(map(printable, lines.split("\n"))))


def _lines(attention: "Attention") -> Iterator[str]:
    known = {"N": attention.num_heads, "K": attention.num_kv_heads}
    known |= {"H": attention.head_dim, "D": attention.embed_dim}
    letters = ", ".join(f"{k} = {'unknown' if v is None else v}" for k, v in known.items())
    yield f"{attention.design}: {letters}"
    yield f"{', '.join(attention.dtype)}, {attention.bytes:,} bytes a layer"
    yield f"packed: {attention.packed}" if attention.packed else "split projections"
    does = {k: v for k, v in attention.does.items() if v not in (None, False)}
    if does:
        yield ", ".join(k if v is True else f"{k} {_plain(v)}" for k, v in does.items())
    yield from attention.doubts


def _plain(value: Any) -> str:
    if not isinstance(value, dict):
        return str(value)
    set_fields = {k: v for k, v in value.items() if v not in (None, False)}
    return f"({', '.join(k if v is True else f'{k} {v}' for k, v in set_fields.items())})"
