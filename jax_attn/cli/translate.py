"""`jax-attn translate`: the source of an NNX module, its weights and proof, of a torch module."""

import shlex
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jax_attn.cli.checking.request import Judged, explained, refusals, refuse, stdout_is_stderr
from jax_attn.cli.checking.shown import Forms
from jax_attn.cli.status import Exit, expect_installed
from jax_attn.cli.status import refuse as refuse_transfer
from jax_attn.environment import settle_platforms
from jax_attn.parity.pair.errors import PairError
from jax_attn.parity.pair.pair import Pair
from jax_attn.parity.pair.read import made
from jax_attn.transfer import TransferError

if TYPE_CHECKING:
    from jax_attn.parity.judge.result import Result

Axes = dict[str, dict[int, str]]

_GIVEN = ("reference", "port", "inputs", "dtype", "transforms")
"""The arguments of a Pair that go with a translation: its port is None, its dtype float32."""


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
@click.argument("named", metavar="FILE.py:FUNCTION")
@click.argument("out", metavar="OUT", type=click.Path(path_type=Path))
@click.option(
    "--dynamic",
    multiple=True,
    metavar="INPUT=B,T,...",
    callback=_axes,
    help="The sizes of this input that vary, by the names of its axes in order, - for a fixed one; "
    "may be repeated. Axes with the same name have the same size.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the whole result as JSON.")
def command(named: str, out: Path, dynamic: Axes, as_json: bool) -> None:
    """Translate a PyTorch module into the source of an NNX module, and prove it.

    FUNCTION, in a file or as package.module:FUNCTION, needs no arguments. It returns (torch
    module, inputs), or a parity.Pair whose port is None. The inputs are NumPy arrays, a tuple or a
    dict. OUT is a folder that does not exist yet. It receives model.py, which imports jax and flax
    alone, weights.safetensors, README.md and the report of the check.

    The verdict compares outputs and every gradient with the reference in float64, eager and
    jitted, within the rounding of float32; with --dynamic also at other sizes. A FAIL is
    explained. The folder is written whatever the verdict is. The module is translated in eval mode.

    Exit status: 0 for PASS, 1 for FAIL, 2 if the module cannot be translated, 3 if a package is
    missing or memory runs out, 4 for INCONCLUSIVE.
    """
    expect_installed("torch", "is the reference", "torch")
    settle_platforms()
    words = [f"--dynamic={name}={_spelled(axes)}" for name, axes in dynamic.items()]
    line = shlex.join(["jax-attn", "translate", named, str(out), *words])
    try:
        with stdout_is_stderr():
            judged = TranslateJob(named, out, dynamic).done()
    except TransferError as error:
        refuse_transfer(error)
    except (PairError, MemoryError) as error:
        refuse(error)
    Forms(None, as_json=as_json, all_tensors=False).show(judged, line)
    click.echo(f"{judged.result.verdict}: {out} holds the translation", err=as_json)
    sys.exit(Exit[judged.result.verdict])


def _spelled(axes: dict[int, str]) -> str:
    return ",".join(axes.get(axis, "-") for axis in range(max(axes, default=-1) + 1))


@dataclass(frozen=True)
class TranslateJob:
    """One translation of a user's module. named: the function. dynamic: the axes that vary."""

    named: str
    out: Path
    dynamic: Axes

    def done(self) -> Judged:
        """Translate, prove, explain and write; return the result of the check.

        Raises PairError for a file or module that cannot be translated, TransferError if the
        folder cannot be written, and MemoryError.
        """
        from jax_attn.translate.folder import expect_new, write
        from jax_attn.translate.proof import loaded, prove
        from jax_attn.translate.translation import translate

        expect_new(self.out)
        reference, inputs = given(self.named, made(self.named, None))
        with refusals(), _refused_by_torch(self.named):
            translation = translate(reference, inputs, dynamic=self.dynamic or None)
        with refusals():
            port = loaded(translation, reference)
            result = prove(translation, reference, inputs, dynamic=self.dynamic or None, port=port)
            judged = explained(replace(result, name=self.named))
        result = judged.result
        write(
            self.out,
            translation,
            port,
            inputs,
            result,
            reference=f"{type(reference).__module__}.{type(reference).__qualname__}",
            sizes=self.dynamic,
            files={"report.md": _report(result)},
        )
        return judged


def given(named: str, result: Any) -> tuple[Any, Any]:
    """Return the module and its inputs, of what a function returned. Raises PairError."""
    expected = "expected (torch module, inputs) or a parity.Pair whose port is None"
    if isinstance(result, Pair):
        nothing: Any = None
        plain = Pair(nothing, None, nothing)
        others = [
            f.name
            for f in fields(Pair)
            if f.name not in _GIVEN and getattr(result, f.name) != getattr(plain, f.name)
        ]
        problems = [] if result.port is None else [f"{named}: port: expected None, got a port"]
        if others:
            problems.append(f"{named}: a translation takes no {', '.join(others)}; leave them out")
        if problems:
            raise PairError("\n".join(problems))
        result = result.reference, result.inputs
    if not (isinstance(result, tuple) and len(result) == 2):
        got = f"{len(result)} values" if isinstance(result, tuple) else type(result).__name__
        raise PairError(f"{named}: {expected}, got {got}")
    reference, inputs = result
    if not isinstance(inputs, tuple | dict):
        raise PairError(
            f"{named}: inputs: expected a tuple or a dict of arrays, got {type(inputs).__name__}"
        )
    return reference, inputs


@contextmanager
def _refused_by_torch(named: str) -> Iterator[None]:
    """Turn what torch.export or a missing rule says of a module into a PairError."""
    try:
        yield
    except NotImplementedError as error:
        raise PairError(f"{named}: is not translated yet: {error}") from error
    except Exception as error:
        if isinstance(error, PairError) or not _is_of_torch(error):
            raise
        raise PairError(f"{named}: torch.export refuses it: {error}") from error


def _is_of_torch(error: BaseException) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and "torch" in Path(frames[-1].filename).parts


def _report(result: "Result") -> str:
    from jax_attn.environment import describe
    from jax_attn.report.documents import as_markdown

    return as_markdown([result], describe())
