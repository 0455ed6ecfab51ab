"""The steps of `jax-attn port`: open, plan, write, prove, check.

This module imports NumPy and the tables, so the command line imports it only when a port starts.
"""

import contextlib
import importlib
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from jax_attn import environment, transfer
from jax_attn.cli.common.held import Held
from jax_attn.cli.common.progress import bytes_counted, tracked
from jax_attn.cli.status import Exit
from jax_attn.families import Config, family_of, known_types, model_problems, said_type
from jax_attn.families.config import disagreements
from jax_attn.families.family import prefixed
from jax_attn.families.whole import QUANTIZED, as_plain, is_mxfp4, unusable
from jax_attn.parity.judge.compare import Verdict
from jax_attn.parity.judge.result import Result
from jax_attn.parity.judge.text import console
from jax_attn.porting.port import carry_and_prove
from jax_attn.porting.port.plan import PortPlan, Side, plan_port, reached
from jax_attn.porting.port.table import PortTable, by_family, by_layout
from jax_attn.report.documents import as_json as results_as_json
from jax_attn.report.documents import cases_table
from jax_attn.transfer import Layout, Problem, TransferError
from jax_attn.transfer.arrays import specs
from jax_attn.transfer.files import port_folder, staging
from jax_attn.transfer.files.changed_files import Stamps, changed, stamped
from jax_attn.transfer.files.mxfp4 import dequantized
from jax_attn.transfer.files.port_folder import read_config
from jax_attn.transfer.files.prefixes import stripped, unwrapped
from jax_attn.transfer.problems import nearest


@dataclass(frozen=True)
class Job:
    """A checkpoint to carry, and the table that translates it.

    stamps: the files that must not change during the port. problems: the reasons found so far why
    it cannot be ported. left_out: fields of the config that the written one lacks.
    """

    source: Path
    tensors: port_folder.LazyTensors
    stamps: Stamps
    table: PortTable
    family: str | None
    config: Config
    problems: list[Problem]
    left_out: tuple[str, ...] = ()


_PLAIN = "experts in MXFP4 are read as bfloat16, and written so; porting back keeps them plain"
_LOAD = """
from jax_attn import models
model = models.load({!r})
logits = model({}"""
"""Code that loads and calls the written model."""
_CALLS = {
    False: "tokens).logits  # tokens: (B, T) integers",
    True: "tokens, decoder_tokens=begun).logits  # (B, S) and (B, T) integers",
}
"""How the model is called: whether it has a decoder that reads an encoder -> the call."""


@dataclass
class PortOutcome:
    """The outcome of a port so far; None stands for what is not known yet.

    written: the folder, if it was kept. has_model: whether `jax_attn.models` can load it.
    """

    family: str | None = None
    plan: PortPlan | None = None
    proof: carry_and_prove.Proof | None = None
    check: list[Result] | None = None
    written: str | None = None
    has_model: bool = False
    problems: list[Problem] = field(default_factory=list)

    @property
    def status(self) -> Exit:
        """FAIL if the proof fails, else the worst verdict of the check, or PASS without one."""
        if self.proof is not None and self.proof.problems:
            return Exit.FAIL
        if self.check is None:
            return Exit.PASS
        return Exit[Verdict.worst(result.verdict for result in self.check)]

    def print(self, as_json: bool) -> None:
        """Print the outcome on stdout; as text without the plan, which is printed before."""
        if as_json:
            click.echo(json.dumps(self._as_dict(), indent=1))
            return
        if self.check is not None:
            console().print(cases_table(self.check))
            for result in self.check:
                if result.reasons:
                    console().print(f"{result.name}: {'; '.join(map(str, result.reasons))}")
        if self.proof is not None:
            for problem in self.proof.problems:
                click.echo(problem)
            click.echo(self.proof)
            click.echo(f"written: {self.written}" if self.written is not None else "nothing kept")
        if self.written is not None and self.has_model:
            moves = () if self.plan is None else self.plan.moves
            reads_source = any(p.startswith("decoder.") for move in moves for p in move.paths)
            click.echo(_LOAD.format(self.written, _CALLS[reads_source]))

    def _as_dict(self) -> dict[str, Any]:
        document: dict[str, Any] = {}
        if self.plan is not None:
            document |= {"family": self.family, "plan": self.plan.as_dict()}
        if self.proof is not None:
            document["proof"] = self.proof.as_dict()
        if self.check is not None:
            document["check"] = json.loads(results_as_json(self.check, environment.describe()))
        if self.written is not None:
            document["written"] = self.written
        if self.problems:
            document["problems"] = [problem._asdict() for problem in self.problems]
        return document


class _NothingKeptError(Exception):
    """The written files are wrong, so the folder is not kept."""


def imported_layout(named: str) -> Layout:
    """Import the Layout that `package.module:TABLE` names; the working directory is searched too.

    Raises UsageError.
    """
    module, colon, name = named.partition(":")
    if not (module and colon and name):
        raise click.UsageError(f"--layout: expected package.module:TABLE, got {named!r}")
    before = [*sys.path]
    sys.path.insert(0, "")
    try:
        members = vars(importlib.import_module(module))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a user's module may raise anything
        kind = type(error).__name__
        raise click.UsageError(f"--layout: {module} does not import: {kind}: {error}") from error
    finally:
        sys.path[:] = before
    tables = [key for key, value in members.items() if issubclass(type(value), Layout)]
    if name not in tables:
        text = f"--layout: expected one of the Layouts {tables} in {module}, got {name!r}"
        raise click.UsageError(f"{text}; {nearest(name, tables)}".removesuffix("; "))
    return members[name]


# Units of an age, in seconds, the largest first.
_UNITS = {"day": 86400, "hour": 3600, "minute": 60, "second": 1}


def tell_leftovers(target: Path, clean: bool) -> None:
    """Print a line on stderr for each hidden folder that another port to `target` has left.

    clean: whether to delete the folders whose port was killed. Raises TransferError.
    """
    for leftover in staging.leftovers(target):
        unit, size = next((u, s) for u, s in _UNITS.items() if leftover.seconds >= s or s == 1)
        count = int(leftover.seconds / size)
        age = f"{count} {unit}{'' if count == 1 else 's'} old"
        if leftover.at_work or (clean and not staging.remove(leftover)):
            outcome = "of a port that is still running: left alone"
        else:
            outcome = "of a port that was killed: "
            outcome += "removed" if clean else "--clean removes it"
        click.echo(f"{leftover.folder}: {age}, {outcome}", err=True)


def open_job(
    source: Path,
    to: Side,
    layout: Layout | None,
    held: Held,
    heads: Mapping[str, int | None],
) -> Job:
    """Open the checkpoint, strip its keys, and choose its table. Raises TransferError.

    heads: --num-heads, --num-kv-heads and --head-dim, in this order; None if not given.
    """
    # Stamped before anything is read, so that no change is missed.
    stamps = stamped(
        port_folder.beside(source) / name for name in (*port_folder.CONFIGS, port_folder.RECORD)
    )
    config = read_config(source) or {}
    if port_folder.side_of(source) == to:
        raise _wrong_way(source, to)
    if to == "torch":
        opened: Any = port_folder.read_again(source)
    else:
        opened = transfer.load_checkpoint(source, part=held.part)
    tensors, problems = stripped(opened, held.strip)
    if to == "flax":
        tensors, wrapped = unwrapped(tensors, layout.torch_keys() if layout else ())
        problems += wrapped
    has_mxfp4 = to == "flax" and is_mxfp4(config)
    if has_mxfp4:
        tensors, halved = dequantized(tensors)
        problems += halved
        config = as_plain(config)
        click.echo(_PLAIN, err=True)
    if unfit := unusable(config):
        raise TransferError("port wrote nothing", [*problems, *unfit])
    family = None
    if layout is not None:
        table = by_layout(layout, config, heads)
    elif (family := family_of(config)) is not None:
        if to == "flax" and (prefix := prefixed(family, config, tensors)):
            raise TransferError("port wrote nothing", [*problems, *prefix])
        keys = port_folder.read_record(source).get("keys", []) if to == "torch" else tensors
        table = by_family(family, config, keys, tensors if to == "torch" else ())
        problems += disagreements(heads, table.sizes or (None, None, None))
    else:
        unknown = _unknown_family(source, to, config, held)
        raise TransferError("port wrote nothing", [*problems, unknown])
    name = None if family is None else family.name
    stamps |= opened.stamps
    left_out = (QUANTIZED,) if has_mxfp4 else ()
    return Job(source, tensors, stamps, table, name, config, problems, left_out)


def _wrong_way(source: Path, to: Side) -> TransferError:
    other = "torch" if to == "flax" else "flax"
    text = f"expected the {other} side of a checkpoint, got the {to} side"
    return TransferError(
        "port wrote nothing", [Problem("refused", str(source), text, f"pass --to {other}")]
    )


def _unknown_family(source: Path, to: Side, config: Config, held: Held) -> Problem:
    known = ", ".join(known_types())
    families = f"the supported families, which are {known}, and Llama as Meta publishes it"
    got = f"model_type {said_type(config)}" if config else "none"
    text = f"expected a config.json next to {source} that names one of {families}; got {got}"
    command = f"jax-attn port {shlex.quote(str(source))} OUT --to {to}{held.options}"
    start = f"jax-attn inspect {shlex.quote(str(source))}{held.options} --table table.py"
    hint = f"run: {start}; answer its questions, and run: {command} --layout table:LAYOUT"
    return Problem("refused", "model_type", text, hint)


def plan_job(job: Job, to: Side, ignore: Sequence[str], **casting: Any) -> PortPlan:
    """Plan the port of every tensor. Raises TransferError.

    casting: dtype, lossy and allow_nonfinite, as `plan_port` takes them.
    """
    total = sum(spec.nbytes for spec in specs(job.tensors)[0].values())
    with bytes_counted("looking", total) as looked_at:
        plan = plan_port(job.tensors, job.table, to, ignore=ignore, looked_at=looked_at, **casting)
    if to == "torch" and not plan.moves and reached(job.table.layout, job.tensors):
        raise _wrong_way(job.source, to)
    return plan


def carry_out(
    job: Job, plan: PortPlan, target: Path, kind: str, check: bool, outcome: PortOutcome
) -> None:
    """Write, prove and check; keep nothing if any of these fails. Raises TransferError.

    outcome: receives the results, step by step.
    """
    if check:  # imports torch, and an interrupted import is untidy: do it before writing anything
        importlib.import_module("jax_attn.porting.verify.layer")
    keys = [key for move in plan.moves for key in move.row.keys]
    record = {"to": plan.to, "family": job.family, "keys": keys, "passed_over": plan.passed_over}
    with contextlib.suppress(_NothingKeptError), staging.staged(target) as folder:
        with bytes_counted("writing", plan.source_bytes) as looked_at:
            carried = carry_and_prove.Carried(plan, job.tensors, looked_at)
            port_folder.write(folder, carried, kind, record, job.source, plan.dtype, job.left_out)
        written = port_folder.read_again(folder)
        with bytes_counted("proving", plan.source_bytes) as looked_at:
            proof = carry_and_prove.prove(plan, job.tensors, written, looked_at)
        proof = proof._replace(problems=[*proof.problems, *changed(job.stamps)])
        outcome.proof = proof
        if check and not proof.problems:
            outcome.check = _check(job, plan, written)
        if outcome.status is Exit.FAIL:
            raise _NothingKeptError
    if outcome.status is not Exit.FAIL:
        outcome.written = str(target)
        # Only a family's own table writes the names of a model's parameters.
        is_named = plan.to == "flax" and job.family is not None
        outcome.has_model = is_named and not model_problems(job.config)


def _check(job: Job, plan: PortPlan, written: Mapping[str, Any]) -> list[Result]:
    """Return the verdicts on the attention layers that were written."""
    from jax_attn.porting.verify.layer import verify_port  # imports torch
    from jax_attn.porting.verify.survey import survey_port

    layers = survey_port(job.tensors, job.config, job.table.sizes)
    batches = ([verify_port(layer, job.tensors, written, plan)] for layer in layers)
    return list(tracked(batches, len(layers)))
