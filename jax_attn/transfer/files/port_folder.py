"""Files of a port: a folder of tensors, the config, and a record for the way back.

model.safetensors, or its shards and their index; or state/, an orbax checkpoint
config.json     the source's, except for the dtype that a port was cast to
port.json       {"schema_version", "to", "family", "keys": [torch keys], "passed_over"}
"""

import json
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from jax_attn.transfer.files.checkpoint import Checkpoint, load_checkpoint
from jax_attn.transfer.files.json_file import read_json
from jax_attn.transfer.files.local import expect_local
from jax_attn.transfer.files.prefixes import Renamed
from jax_attn.transfer.files.writing import save_checkpoint
from jax_attn.transfer.problems import Problem, TransferError, file_error

if TYPE_CHECKING:
    from jax_attn.transfer.files.orbax_folder import OrbaxFolder

LazyTensors: TypeAlias = "Checkpoint | OrbaxFolder | Renamed"
"""A checkpoint of either side, or a view of one, with shapes and dtypes known without reading."""

CONFIGS = ("config.json", "params.json")
GENERATION = "generation_config.json"
RECORD = "port.json"
_TENSORS = "model.safetensors"
_STATE = "state"
_DTYPES = ("dtype", "torch_dtype")
"""A config's names for the weights' dtype, new and old."""
_SHARD = 5 * 10**9
"""Bytes of tensors in a file."""


def refused_target(target: Path) -> list[Problem]:
    """Say why a folder of this name cannot be created."""

    def refused(path: Path, text: str) -> list[Problem]:
        return [Problem("file", str(path), text)]

    try:
        parent = target.absolute().parent
    except FileNotFoundError:
        return refused(target, "expected a folder to write into, but the working directory is gone")
    try:
        os.lstat(target)
        return refused(target, "expected a folder that does not exist yet; nothing is overwritten")
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:
        return refused(target, f"expected a valid name for a folder: {error}")
    there = next(p for p in (parent, *parent.parents) if os.path.lexists(p))
    if not os.path.isdir(there):
        return refused(there, "expected a folder to write into, but it is not a folder")
    if not os.access(there, os.W_OK):
        return refused(there, "expected a folder to write into, but it is read-only")
    return []


def write(
    folder: Path,
    tensors: Mapping[str, Any],
    kind: str,
    record: Mapping[str, Any],
    source: Path,
    dtype: str | None = None,
    left_out: Collection[str] = (),
) -> None:
    """Fill a folder with tensors, the record, and the configs from the folder of `source`.

    dtype: what floating-point numbers were cast to; it replaces another dtype in the config.
    left_out: fields of the config that are not written.
    """
    configs = {}
    for name in (*CONFIGS, GENERATION):
        config = beside(source) / name
        if config.is_file():
            content = config.read_bytes()
            if name == CONFIGS[0]:  # the others have no dtype
                content = _changed(content, dtype, left_out)
            configs[name] = content
    write_all(folder, tensors, configs, record, kind)


def write_all(
    folder: Path,
    tensors: Mapping[str, Any],
    configs: Mapping[str, bytes],
    record: Mapping[str, Any],
    kind: str = "safetensors",
) -> None:
    """Fill a folder with tensors, a record and these configs, by their names."""
    if kind == "orbax":
        from jax_attn.transfer.files import orbax_folder

        orbax_folder.save(folder / _STATE, tensors)
    else:
        save_checkpoint(folder / _TENSORS, tensors, shard_bytes=_SHARD)
    for name, config in configs.items():
        _write_whole(folder / name, config)
    document = json.dumps({"schema_version": 1, **record}, indent=1)
    _write_whole(folder / RECORD, document.encode())


def read_again(path: Path) -> "Checkpoint | OrbaxFolder":
    """Open the tensors of a port, or of any checkpoint, lazily. Raises TransferError."""
    for folder in (path / _STATE, path):
        if (folder / "_METADATA").is_file():
            from jax_attn.transfer.files import orbax_folder

            return orbax_folder.load(folder)
    return load_checkpoint(path)


def read_record(path: Path) -> dict[str, Any]:
    """Return a port's record; {} if there is none. Raises TransferError for an invalid one."""
    file = beside(path) / RECORD
    if not file.is_file():
        return {}
    try:
        record = read_json(file)
        keys = record["keys"]
        if not (isinstance(keys, list) and all(isinstance(key, str) for key in keys)):
            raise ValueError("keys: expected a list of names")
    except (ValueError, LookupError, TypeError, RecursionError, OSError) as error:
        raise file_error(file, f"expected the record of a port: {error!r}") from error
    return record


def side_of(path: Path) -> str | None:
    """Return the side that a port wrote at `path`; None if no port did."""
    try:
        return read_record(path).get("to")
    except TransferError:  # another file with that name
        return None


def beside(path: Path) -> Path:
    """Return the folder of a checkpoint's config."""
    return path if path.is_dir() else path.parent


def read_config(path: Path, names: Sequence[str] = CONFIGS) -> dict[str, Any] | None:
    """Return the config.json in a checkpoint's folder, else Meta's params.json, else None.

    path: the checkpoint, a file or a folder. names: those of another config that lies there. Raises
    TransferError if the config is not a file, which is checked before opening, or not a JSON
    object; and for what `load_checkpoint` refuses unopened.
    """
    expect_local(path)
    folder = beside(path)
    file = next((folder / name for name in names if os.path.lexists(folder / name)), None)
    if file is None:
        return None
    try:
        config = read_json(file)
    except (ValueError, RecursionError, OSError) as error:
        raise _config_error(file, f"expected JSON: {error}") from error
    if not isinstance(config, dict):
        raise _config_error(file, f"expected a JSON object, got {type(config).__name__}")
    return config


def _changed(config: bytes, dtype: str | None, left_out: Collection[str]) -> bytes:
    """Return a config that names `dtype` in place of another, and no field that is left out.

    It is byte for byte the same if nothing changes.
    """
    if dtype is None and not left_out:
        return config
    held = json.loads(config)
    named = {name: value for name, value in held.items() if name not in left_out}
    if dtype is not None:
        named |= {name: dtype for name in _DTYPES if named.get(name) not in (None, dtype)}
    return config if named == held else f"{json.dumps(named, indent=2)}\n".encode()


def _config_error(file: Path, reason: str) -> TransferError:
    return TransferError("reading the config", [Problem("file", str(file), reason)])


def _write_whole(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
