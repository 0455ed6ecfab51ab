"""Safetensors files, written whole or not at all, with one tensor in memory at a time.

The safetensors package writes each file with its header and zeros for values; the values are then
written one by one at the offsets of the header.
"""

import contextlib
import json
import os
import re
import secrets
from itertools import count
from pathlib import Path
from typing import IO, Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from jax_attn.transfer.arrays import (
    Spec,
    Tensors,
    chunks,
    describe,
    expect_mapping,
    read,
    same_memory,
    specs,
)
from jax_attn.transfer.files.checkpoint import INDEX
from jax_attn.transfer.files.safetensors_file import DTYPE_OF_CODE, FORMAT, offsets
from jax_attn.transfer.problems import Problem, TransferError, file_error

Specs = dict[str, Spec]


def save_checkpoint(
    path: str | os.PathLike[str], tensors: Tensors, *, shard_bytes: int | None = None
) -> None:
    """Write `tensors` as safetensors: completely, or not at all.

    Files are written under hidden names and renamed once all are on the disk, the index last and
    after the old index is deleted, so that neither a failure nor a reader ever sees half a
    checkpoint. A checkpoint at `path`, in one file or many, is replaced. Tensors that share memory
    are written once; the metadata names the others, where `load_checkpoint` finds them;
    `safetensors.torch.load_model` does not need them.

    Args:
      path: a name that ends in .safetensors.
      tensors: a mapping of torch keys to NumPy, JAX or torch tensors. A lazy mapping is read one
        tensor at a time, each twice unless the mapping has `describe`.
      shard_bytes: how many bytes of tensors a file may hold; a larger tensor has its own file. If
        one file is not enough, the files are name-00001-of-00003.safetensors and so on, with the
        index name.safetensors.index.json, as transformers reads them. None writes one file.

    Raises:
      TypeError: tensors is not a mapping.
      TransferError: the format cannot hold some tensors, whose keys are listed; or the disk is full
        or read-only.
    """
    expect_mapping(tensors)
    path = Path(path)
    if path.suffix != ".safetensors":
        raise file_error(path, f"expected a name that ends in .safetensors, got {path.name!r}")
    if shard_bytes is not None and (type(shard_bytes) is not int or shard_bytes < 1):
        raise ValueError(f"shard_bytes: expected an int ≥ 1 or None, got {shard_bytes!r}")
    specs, ties = _survey(tensors)
    shards = _shards(path, {k: s for k, s in specs.items() if k not in ties}, shard_bytes)
    staged: dict[str, Path] = {}  # final name -> hidden file
    try:
        for name, keys in shards.items():
            staged[name] = _beside(path, name)
            notes = {key: kept for key, kept in ties.items() if kept in keys}
            # "pt" means that names and axes are torch's; transformers requires it.
            _write(staged[name], tensors, keys, {FORMAT: "pt"} | notes)
        if len(shards) > 1:
            name = path.name + INDEX
            staged[name] = _beside(path, name)
            _write_index(staged[name], shards)
        _replace(path, staged)
    except (SafetensorError, OSError) as error:
        raise file_error(path, f"cannot be written: {error}") from error
    finally:
        for partial in staged.values():
            with contextlib.suppress(OSError):  # most are renamed by now
                partial.unlink()


def _survey(tensors: Tensors) -> tuple[Specs, dict[str, str]]:
    """Return every tensor's shape and dtype, and the ties: left-out key -> kept key."""
    by_key, problems = specs(tensors)
    for key, spec in by_key.items():
        if spec.dtype not in DTYPE_OF_CODE.values():
            text = f"expected one of {', '.join(DTYPE_OF_CODE.values())}, got {spec.dtype}"
            problems.append(Problem("wrong dtype", key, text))
        if key == "__metadata__" or key.encode("utf-8", "ignore").decode() != key:
            text = "expected Unicode text other than '__metadata__' as key"
            problems.append(Problem("unreadable", key, text))
    if problems:
        raise TransferError("saving a checkpoint", problems)
    computed = hasattr(tensors, "describe") and not hasattr(tensors, "mapped")
    ties = {} if computed else same_memory(tensors, by_key)
    ties.pop(FORMAT, None)
    return by_key, ties


def _shards(path: Path, by_key: Specs, shard_bytes: int | None) -> dict[str, Specs]:
    """Return file names with their tensors, in the caller's order."""
    shards: list[Specs] = [{}]
    room = shard_bytes
    for key, spec in by_key.items():
        if room is not None and spec.nbytes > room and shards[-1]:
            shards.append({})
            room = shard_bytes
        shards[-1][key] = spec
        room = None if room is None else room - spec.nbytes
    if len(shards) == 1:
        return {path.name: shards[0]}
    names = (f"{path.stem}-{i:05d}-of-{len(shards):05d}{path.suffix}" for i in count(1))
    return dict(zip(names, shards, strict=False))


def _write(partial: Path, tensors: Tensors, by_key: Specs, notes: dict[str, str]) -> None:
    partial.touch(exist_ok=False)
    mode = partial.stat().st_mode  # the umask's; safetensors sets 0600
    zeros = np.zeros(max((spec.nbytes for spec in by_key.values()), default=0), np.uint8)
    blank = {k: zeros[: s.nbytes].view(s.dtype).reshape(s.shape) for k, s in by_key.items()}
    save_file(blank, partial, metadata=notes)
    partial.chmod(mode)
    begin = offsets(partial)
    with partial.open("r+b") as file:
        for key, spec in by_key.items():
            file.seek(begin[key])
            _copy(read(tensors, key), key, spec, file)
        _flush(file)


def _copy(array: np.ndarray, key: str, spec: Spec, file: IO[bytes]) -> None:
    if describe(array) != spec:
        text = f"expected {spec}, as described before, got {describe(array)}"
        raise TransferError("saving a checkpoint", [Problem("wrong shape", key, text)])
    for chunk in chunks(array):
        file.write(chunk.data)


def _write_index(partial: Path, shards: dict[str, Specs]) -> None:
    homes = {key: name for name, keys in shards.items() for key in keys}
    size = sum(spec.nbytes for keys in shards.values() for spec in keys.values())
    index = {"metadata": {"total_size": size}, "weight_map": homes}
    with partial.open("x", encoding="utf-8") as file:
        file.write(json.dumps(index, indent=2, sort_keys=True) + "\n")
        _flush(file)


def _replace(path: Path, staged: dict[str, Path]) -> None:
    """Rename the files to their final names, and delete those of an older checkpoint at `path`."""
    index = path.name + INDEX
    if index in staged:  # new files under the old index would look complete
        path.with_name(index).unlink(missing_ok=True)
    for name, partial in staged.items():
        if name == index:
            flush_folder(path.parent)
        partial.replace(path.with_name(name))
    shard = re.compile(re.escape(path.stem) + r"-\d{5}-of-\d{5}" + re.escape(path.suffix))
    for name in os.listdir(path.parent):
        if name not in staged and (name in (path.name, index) or shard.fullmatch(name)):
            path.with_name(name).unlink(missing_ok=True)
    flush_folder(path.parent)


def _beside(path: Path, name: str) -> Path:
    return path.with_name(f".{name}.{secrets.token_hex(4)}.partial")


def _flush(file: IO[Any]) -> None:
    file.flush()
    os.fsync(file.fileno())


def flush_folder(folder: Path) -> None:
    """Flush a folder, so that files created or renamed in it survive a power cut."""
    if hasattr(os, "O_DIRECTORY"):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
