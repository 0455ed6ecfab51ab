"""What `jax-attn port` does, step by step: open, plan, write, prove, check."""

import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from jax_attn.cli.status import Exit

if TYPE_CHECKING:
    from jax_attn.parity.judge.result import Result
    from jax_attn.transfer import Layout, Problem
    from jax_attn.transfer.files.changed_files import Stamp
    from jax_attn.transfer.port.carry_and_prove import Proof
    from jax_attn.transfer.port.files import LazyTensors
    from jax_attn.transfer.port.plan import PortPlan
    from jax_attn.transfer.port.table import PortTable


@dataclass(frozen=True)
class Options:
    """What the caller asks for beside the two paths.

    heads: --num-heads, --num-kv-heads and --head-dim, in this order. kind: the format of OUT.
    """

    to: Literal["flax", "torch"]
    layout: "Layout | None"
    heads: Mapping[str, int | None]
    ignore: tuple[str, ...]
    strip: str
    dtype: str | None
    lossy: bool
    allow_nonfinite: bool
    kind: str
    check: bool
    dry_run: bool


@dataclass(frozen=True)
class Job:
    """A checkpoint to carry, and the table found for it.

    stamps: the files that must not change meanwhile. problems: what stands in the way so far.
    """

    source: Path
    tensors: "LazyTensors"
    stamps: "Mapping[Path, Stamp | None]"
    table: "PortTable"
    family: str | None
    config: Mapping[str, Any] | None
    problems: "list[Problem]"


@dataclass
class Outcome:
    """What is known of a port as it goes on; None: not yet."""

    family: str | None = None
    plan: "PortPlan | None" = None
    proof: "Proof | None" = None
    check: "list[Result] | None" = None
    written: str | None = None
    problems: "list[Problem]" = field(default_factory=list)

    @property
    def status(self) -> Exit:
        """FAIL where the proof fails, else as the check has it."""
        from jax_attn.parity.judge.compare import Verdict

        if self.proof is not None and self.proof.problems:
            return Exit.FAIL
        if self.check is None:
            return Exit.PASS
        return Exit[Verdict.worst(result.verdict for result in self.check)]


class _NothingKeptError(Exception):
    """What was written is not what it should be."""


def port(
    source: Path,
    target: Path,
    options: Options,
    outcome: Outcome,
    show_plan: Callable[["PortPlan"], None],
) -> Exit:
    """Carry a checkpoint; what is known goes into `outcome` step by step.

    show_plan: called before anything is written. Raises TransferError where it cannot be ported.
    """
    from jax_attn.transfer import TransferError
    from jax_attn.transfer.port.files import refused_target, staged

    job = _open(source, options)
    plan = _plan(job, options)
    outcome.family, outcome.plan = job.family, plan
    show_plan(plan)
    if problems := [*job.problems, *plan.problems, *refused_target(target)]:
        raise TransferError("port, nothing written", problems)
    if options.dry_run:
        return Exit.PASS
    _warn_of_unfinished(target)
    try:
        with staged(target) as folder:
            written = _write(folder, job, plan, options.kind)
            outcome.proof = _prove(job, plan, written)
            if options.check and not outcome.proof.problems:
                outcome.check = _check(job, plan, written)
            if outcome.status is Exit.FAIL:
                raise _NothingKeptError
    except _NothingKeptError:
        return Exit.FAIL
    outcome.written = str(target)
    return outcome.status


# --- what is carried ----------------------------------------------------------------------------


def imported_layout(named: str) -> "Layout":
    """The Layout that `package.module:TABLE` names, in the working directory too."""
    from jax_attn.transfer import Layout
    from jax_attn.transfer.problems import nearest

    module, colon, name = named.partition(":")
    if not (module and colon and name):
        raise click.UsageError(f"--layout: expected package.module:TABLE, got {named!r}")
    before = [*sys.path]
    sys.path.insert(0, "")
    try:
        members = vars(importlib.import_module(module))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever the caller's module raises
        kind = type(error).__name__
        raise click.UsageError(f"--layout: {module} does not import: {kind}: {error}") from error
    finally:
        sys.path[:] = before
    tables = [key for key, value in members.items() if issubclass(type(value), Layout)]
    if name not in tables:
        text = f"--layout: expected one of the Layouts {tables} of {module}, got {name!r}"
        raise click.UsageError(f"{text}; {nearest(name, tables)}".removesuffix("; "))
    return members[name]


def _open(source: Path, options: Options) -> Job:
    """The checkpoint, its keys stripped, and its table. Raises TransferError."""
    from jax_attn.transfer import load_checkpoint
    from jax_attn.transfer.files.changed_files import stamped
    from jax_attn.transfer.files.prefixes import stripped, unwrapped
    from jax_attn.transfer.inspect.config import read_config
    from jax_attn.transfer.port.files import CONFIGS, RECORD, beside, read_again

    # Before anything is read, so that no change goes unseen.
    stamps = stamped(beside(source) / name for name in (*CONFIGS, RECORD))
    config = read_config(source)
    opened = read_again(source) if options.to == "torch" else load_checkpoint(source)
    tensors, problems = stripped(opened, options.strip)
    if options.to == "flax":
        known = options.layout.torch_keys() if options.layout else ()
        tensors, wrapped = unwrapped(tensors, known)
        problems = [*problems, *wrapped]
    table, family, unsuitable = _table(source, tensors, config or {}, options, problems)
    problems = [*problems, *unsuitable]
    return Job(source, tensors, {**stamps, **opened.stamps}, table, family, config, problems)


def _table(
    source: Path,
    tensors: Mapping[str, Any],
    config: Mapping[str, Any],
    options: Options,
    problems: "list[Problem]",
) -> "tuple[PortTable, str | None, list[Problem]]":
    """The table, the name of its family, and options that disagree with the config.

    problems: those so far, raised too where there is no table.
    """
    from jax_attn.transfer import Problem, TransferError
    from jax_attn.transfer.families import FAMILIES, family_of
    from jax_attn.transfer.families.config import disagreements
    from jax_attn.transfer.port.files import read_record
    from jax_attn.transfer.port.table import by_family, by_layout

    if options.layout is not None:
        return by_layout(options.layout, config, options.heads), None, []
    family = family_of(config)
    if family is None:
        known = sorted(name for f in FAMILIES.values() for name in f.model_types)
        text = f"expected a model_type in config.json beside it, one of {', '.join(known)}"
        own = "--layout package.module:TABLE, a Layout of your own"
        unknown = Problem("missing", "--layout", f"{text}, got {config.get('model_type')!r}", own)
        raise TransferError("port, nothing written", [*problems, unknown])
    if options.to == "torch":
        table = by_family(family, config, read_record(source).get("keys", []), tensors)
    else:
        table = by_family(family, config, tensors)
    unsuitable = disagreements(options.heads, table.sizes or (None, None, None))
    return table, family.name, unsuitable


# --- steps --------------------------------------------------------------------------------------


def _plan(job: Job, options: Options) -> "PortPlan":
    from jax_attn.cli.progress import bytes_counted
    from jax_attn.transfer.arrays import specs
    from jax_attn.transfer.port.plan import plan_port

    total = sum(spec.nbytes for spec in specs(job.tensors)[0].values())
    with bytes_counted("looking", total) as looked_at:
        return plan_port(
            job.tensors,
            job.table,
            options.to,
            ignore=options.ignore,
            dtype=options.dtype,
            lossy=options.lossy,
            allow_nonfinite=options.allow_nonfinite,
            looked_at=looked_at,
        )


def _warn_of_unfinished(target: Path) -> None:
    from jax_attn.transfer.port.files import unfinished

    if names := unfinished(target):
        text = f"beside {target}, of a port that was killed or is at work: {', '.join(names)}"
        click.echo(text, err=True)


def _write(folder: Path, job: Job, plan: "PortPlan", kind: str) -> Mapping[str, Any]:
    """What was written, read again."""
    from jax_attn.cli.progress import bytes_counted
    from jax_attn.transfer.port.carry_and_prove import Carried
    from jax_attn.transfer.port.files import read_again, write

    keys = [key for move in plan.moves for key in move.row.keys]
    record = {"to": plan.to, "family": job.family, "keys": keys, "passed_over": plan.passed_over}
    with bytes_counted("writing", plan.source_bytes) as looked_at:
        carried = Carried(plan, job.tensors, looked_at)
        write(folder, carried, kind, record, job.source, plan.dtype)
    return read_again(folder)


def _prove(job: Job, plan: "PortPlan", written: Mapping[str, Any]) -> "Proof":
    """That what was written leads back to the source, and that the source has not changed."""
    from jax_attn.cli.progress import bytes_counted
    from jax_attn.transfer.files.changed_files import changed
    from jax_attn.transfer.port.carry_and_prove import prove

    with bytes_counted("proving", plan.source_bytes) as looked_at:
        proof = prove(plan, job.tensors, written, looked_at)
    return proof._replace(problems=[*proof.problems, *changed(job.stamps)])


def _check(job: Job, plan: "PortPlan", written: Mapping[str, Any]) -> "list[Result]":
    """The verdicts on the attention that was written."""
    from jax_attn.cli.progress import tracked
    from jax_attn.parity.checkpoint.verify_port import survey_port, verify_port

    blocks = survey_port(job.tensors, job.config, plan, job.table.sizes)
    batches = ([verify_port(block, job.tensors, written, plan)] for block in blocks)
    return tracked(batches, len(blocks))
