"""What `jax-attn port` is to carry: the checkpoint opened, and the table found for it."""

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import click


class Job(NamedTuple):
    """What is carried, through which table, as files that are to stay as they were.

    problems: what was wrong with finding it.
    """

    stamps: Mapping[Path, Any]
    tensors: Mapping[str, Any]
    to: str
    family: str | None
    table: Any
    config: Mapping[str, Any] | None
    problems: list[Any]


def imported(named: str) -> Any:
    """The Layout that `package.module:TABLE` names, of the working directory too."""
    from jax_attn.transfer import Layout
    from jax_attn.transfer.problems import nearest

    module, colon, name = named.partition(":")
    if not (module and colon and name):
        raise click.UsageError(f"--layout: expected package.module:TABLE, got {named!r}")
    before = [*sys.path]
    sys.path.insert(0, "")
    try:
        held = vars(importlib.import_module(module))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever the caller's module raises
        kind = type(error).__name__
        raise click.UsageError(f"--layout: {module} does not import: {kind}: {error}") from error
    finally:
        sys.path[:] = before
    tables = [key for key, value in held.items() if issubclass(type(value), Layout)]
    if name not in tables:
        text = f"--layout: expected one of the Layouts {tables} of {module}, got {name!r}"
        raise click.UsageError(f"{text}; {nearest(name, tables)}".removesuffix("; "))
    return held[name]


def prepared(source: Path, to: str, layout: Any, strip: str, heads: Mapping[str, Any]) -> Job:
    """Open, strip, and find the table. Raises TransferError."""
    from jax_attn.transfer import Problem, TransferError, load_checkpoint
    from jax_attn.transfer.families import FAMILIES, family_of
    from jax_attn.transfer.families.config import disagreements
    from jax_attn.transfer.files.changed_files import stamped
    from jax_attn.transfer.files.prefixes import stripped, unwrapped
    from jax_attn.transfer.inspect.config import read_config
    from jax_attn.transfer.port.files import CONFIGS, RECORD, beside, read_again, read_record
    from jax_attn.transfer.port.table import by_family, by_layout

    stamps = stamped(beside(source) / name for name in (*CONFIGS, RECORD))
    found = read_config(source)
    config = found or {}
    opened = read_again(source) if to == "torch" else load_checkpoint(source)
    stamps |= opened.stamps
    tensors, problems = stripped(opened, strip)
    if to == "flax":
        tensors, more = unwrapped(tensors, layout.torch_keys() if layout else ())
        problems += more
    family = family_of(config)
    if layout is not None:
        return Job(stamps, tensors, to, None, by_layout(layout, config, heads), found, problems)
    if family is None:
        known = sorted(name for f in FAMILIES.values() for name in f.model_types)
        text = f"expected a model_type in config.json beside it, one of {', '.join(known)}"
        own = "--layout package.module:TABLE, a Layout of your own"
        unknown = Problem("missing", "--layout", f"{text}, got {config.get('model_type')!r}", own)
        raise TransferError("port, nothing written", [*problems, unknown])
    if to == "torch":
        keys = read_record(source).get("keys", [])
        table = by_family(family, config, keys, tensors)
    else:
        table = by_family(family, config, tensors)
    problems += disagreements(heads, table.sizes or (None, None, None))
    return Job(stamps, tensors, to, family.name, table, found, problems)
