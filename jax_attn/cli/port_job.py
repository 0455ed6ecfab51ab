"""What `jax-attn port` does, step by step: open, plan, write, prove, check."""

import contextlib
import importlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jax_attn.cli.status import Exit

if TYPE_CHECKING:
    from jax_attn.parity.judge.result import Result
    from jax_attn.transfer import Layout, Problem
    from jax_attn.transfer.files.changed_files import Stamp
    from jax_attn.transfer.port.carry_and_prove import Proof
    from jax_attn.transfer.port.files import LazyTensors
    from jax_attn.transfer.port.plan import PortPlan, Side
    from jax_attn.transfer.port.table import PortTable


Heads = Mapping[str, int | None]
"""--num-heads, --num-kv-heads and --head-dim, in this order; None where not given."""


@dataclass(frozen=True)
class Job:
    """A checkpoint to carry, and the table found for it.

    stamps: the files that must not change meanwhile. problems: what stands in the way so far.
    """

    source: Path
    to: "Side"
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


def open_job(source: Path, to: "Side", layout: "Layout | None", strip: str, heads: Heads) -> Job:
    """The checkpoint, its keys stripped, and its table. Raises TransferError."""
    from jax_attn.transfer import Problem, TransferError, load_checkpoint
    from jax_attn.transfer.families import FAMILIES, family_of
    from jax_attn.transfer.families.config import disagreements
    from jax_attn.transfer.files.changed_files import stamped
    from jax_attn.transfer.files.prefixes import stripped, unwrapped
    from jax_attn.transfer.inspect.config import read_config
    from jax_attn.transfer.port.files import CONFIGS, RECORD, beside, read_again, read_record
    from jax_attn.transfer.port.table import by_family, by_layout

    # Before anything is read, so that no change goes unseen.
    stamps = stamped(beside(source) / name for name in (*CONFIGS, RECORD))
    config = read_config(source)
    opened = read_again(source) if to == "torch" else load_checkpoint(source)
    tensors, problems = stripped(opened, strip)
    if to == "flax":
        tensors, wrapped = unwrapped(tensors, layout.torch_keys() if layout else ())
        problems += wrapped
    family = None if layout is not None else family_of(config or {})
    if layout is not None:
        table = by_layout(layout, config or {}, heads)
    elif family is not None:
        keys = read_record(source).get("keys", []) if to == "torch" else tensors
        table = by_family(family, config or {}, keys, tensors if to == "torch" else ())
        problems += disagreements(heads, table.sizes or (None, None, None))
    else:
        known = sorted(name for f in FAMILIES.values() for name in f.model_types)
        text = f"expected a model_type in config.json beside it, one of {', '.join(known)}"
        text += f", got {(config or {}).get('model_type')!r}"
        own = "--layout package.module:TABLE, a Layout of your own"
        unknown = Problem("missing", "--layout", text, own)
        raise TransferError("port, nothing written", [*problems, unknown])
    stamps |= opened.stamps
    name = None if family is None else family.name
    return Job(source, to, tensors, stamps, table, name, config, problems)


# --- steps --------------------------------------------------------------------------------------


def plan_job(job: Job, ignore: Sequence[str], **casting: Any) -> "PortPlan":
    """casting: dtype, lossy and allow_nonfinite, as `plan_port` takes them."""
    from jax_attn.cli.common.progress import bytes_counted
    from jax_attn.transfer.arrays import specs
    from jax_attn.transfer.port.plan import plan_port

    total = sum(spec.nbytes for spec in specs(job.tensors)[0].values())
    with bytes_counted("looking", total) as looked_at:
        return plan_port(
            job.tensors, job.table, job.to, ignore=ignore, looked_at=looked_at, **casting
        )


def carry_out(
    job: Job, plan: "PortPlan", target: Path, kind: str, check: bool, outcome: Outcome
) -> None:
    """Write, prove and check; nothing is kept where one of them fails.

    outcome: what is known goes there step by step. Raises TransferError.
    """
    from jax_attn.transfer.port.files import staged

    _warn_of_unfinished(target)
    with contextlib.suppress(_NothingKeptError), staged(target) as folder:
        written = _write(folder, job, plan, kind)
        outcome.proof = _prove(job, plan, written)
        if check and not outcome.proof.problems:
            outcome.check = _check(job, plan, written)
        if outcome.status is Exit.FAIL:
            raise _NothingKeptError
    if outcome.status is not Exit.FAIL:
        outcome.written = str(target)


def _warn_of_unfinished(target: Path) -> None:
    from jax_attn.transfer.port.files import unfinished

    if names := unfinished(target):
        text = f"beside {target}, of a port that was killed or is at work: {', '.join(names)}"
        click.echo(text, err=True)


def _write(folder: Path, job: Job, plan: "PortPlan", kind: str) -> Mapping[str, Any]:
    """What was written, read again."""
    from jax_attn.cli.common.progress import bytes_counted
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
    from jax_attn.cli.common.progress import bytes_counted
    from jax_attn.transfer.files.changed_files import changed
    from jax_attn.transfer.port.carry_and_prove import prove

    with bytes_counted("proving", plan.source_bytes) as looked_at:
        proof = prove(plan, job.tensors, written, looked_at)
    return proof._replace(problems=[*proof.problems, *changed(job.stamps)])


def _check(job: Job, plan: "PortPlan", written: Mapping[str, Any]) -> "list[Result]":
    """The verdicts on the attention that was written."""
    from jax_attn.cli.common.progress import tracked
    from jax_attn.parity.checkpoint.verify_port import survey_port, verify_port

    blocks = survey_port(job.tensors, job.config, plan, job.table.sizes)
    batches = ([verify_port(block, job.tensors, written, plan)] for block in blocks)
    return tracked(batches, len(blocks))
