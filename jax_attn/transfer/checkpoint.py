"""Checkpoint files: a lazy mapping out of safetensors, and safetensors written in one piece.

Needs no framework. The format itself is the safetensors package's business.
"""

import contextlib
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  registers bfloat16 with NumPy, which safetensors asks for by name
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jax_attn.transfer.arrays import Spec, as_numpy, describe
from jax_attn.transfer.problems import Problem, TransferError, nearest

_DTYPES = {
    "BOOL": "bool",
    "I8": "int8",
    "U8": "uint8",
    "I16": "int16",
    "U16": "uint16",
    "I32": "int32",
    "U32": "uint32",
    "I64": "int64",
    "U64": "uint64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
}
"""What both directions carry; the format knows more, which NumPy does not."""

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_INDEX = "model.safetensors.index.json"


class Checkpoint(Mapping[str, np.ndarray]):
    """Torch keys to NumPy arrays (bfloat16 by ml_dtypes), each read when it is asked for.

    A context manager; closed, it reads nothing more. Made by `load_checkpoint`.
    """

    def __init__(self, path: Path, shards: list[Path]):
        self.path = path
        self._homes: dict[str, Any] = {}
        with contextlib.ExitStack() as files:
            for shard in shards:
                file = files.enter_context(_opened(shard))
                for key in file.keys():  # noqa: SIM118  a safe_open is no mapping
                    if key in self._homes:
                        raise _bad(path, f"{key!r} is in more than one of its files")
                    self._homes[key] = file
            self._files = files.pop_all()

    def __getitem__(self, key: str) -> np.ndarray:
        dtype = self.describe(key).dtype
        if dtype not in _DTYPES.values():
            known = ", ".join(_DTYPES.values())
            text = f"expected one of {known}, got {dtype}, which NumPy cannot hold"
            raise TransferError(f"reading {self.path}", [Problem("unreadable", key, text)])
        try:
            return self._homes[key].get_tensor(key)
        except (SafetensorError, OSError) as error:
            problem = Problem("unreadable", key, str(error))
            raise TransferError(f"reading {self.path}", [problem]) from error

    def __contains__(self, key: object) -> bool:
        return key in self._homes

    def __iter__(self) -> Iterator[str]:
        return iter(self._homes)

    def __len__(self) -> int:
        return len(self._homes)

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r}, {len(self)} tensors)"

    def describe(self, key: str) -> Spec:
        """Shape and dtype name of one tensor, without reading it."""
        try:
            entry = self._homes[key].get_slice(key)
            dtype = entry.get_dtype()
            return Spec(tuple(entry.get_shape()), _DTYPES.get(dtype, dtype))
        except (SafetensorError, OSError) as error:
            problem = Problem("unreadable", key, str(error))
            raise TransferError(f"reading {self.path}", [problem]) from error

    def close(self) -> None:
        """Close the files; arrays already read stay valid."""
        self._files.close()


def load_checkpoint(path: str | os.PathLike) -> Checkpoint:
    """The tensors of a safetensors file, or of a folder of them, as a lazy mapping.

    A folder: the shards that its `model.safetensors.index.json` names, or else every
    *.safetensors in it. Raises TransferError, naming the file and the reason, for a file that
    is missing, empty, truncated, not safetensors, or names a tensor twice.
    """
    path = Path(path)
    if path.is_dir():
        return _load_folder(path)
    if path.suffix in _PICKLES:
        raise _bad(
            path,
            f"a {path.suffix} file is a pickle, which is not supported yet",
            "convert it where torch is installed: safetensors.torch.save_file(state_dict, …)",
        )
    if path.suffix != ".safetensors":
        raise _bad(path, f"expected a .safetensors file or a folder of them, got {path.name!r}")
    return Checkpoint(path, [path])


def save_checkpoint(path: str | os.PathLike, tensors: Mapping[str, Any]) -> None:
    """Write `tensors` as one safetensors file: whole, or not at all.

    tensors: torch key to NumPy, JAX or torch tensor. Written beside `path` and renamed, so
    that neither a failure nor a reader ever meets half a file. Raises TransferError, naming
    the key, for what the format does not hold.
    """
    path = Path(path)
    if path.suffix != ".safetensors":
        raise _bad(path, f"expected a name that ends in .safetensors, got {path.name!r}")
    arrays = _storable(tensors)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        partial.touch(exist_ok=False)
        mode = partial.stat().st_mode  # what the umask allows: safetensors gives 0600
        # "pt" says that names and axes are torch's; transformers insists on it.
        save_file(arrays, partial, metadata={"format": "pt"})
        partial.chmod(mode)
        _flush(partial, os.O_RDWR)
        partial.replace(path)
    except (SafetensorError, OSError) as error:
        raise _bad(path, f"cannot be written: {error}") from error
    finally:
        partial.unlink(missing_ok=True)
    if hasattr(os, "O_DIRECTORY"):  # the rename itself survives a power cut
        _flush(path.parent, os.O_RDONLY | os.O_DIRECTORY)


def _load_folder(path: Path) -> Checkpoint:
    index = path / _INDEX
    if index.is_file():
        return _load_index(path, index)
    shards = sorted(path.glob("*.safetensors"))
    if not shards:
        names = sorted(entry.name for entry in path.iterdir())
        pickles = [name for name in names if name.endswith(_PICKLES)]
        hint = f"pickles are not supported yet, convert {pickles}" if pickles else ""
        raise _bad(path, f"expected *.safetensors in the folder, got {names[:8]}", hint)
    return Checkpoint(path, shards)


def _load_index(path: Path, index: Path) -> Checkpoint:
    """The shards that an index names; what it says must be what they hold."""
    try:
        homes = json.loads(index.read_text("utf-8"), object_pairs_hook=_unique)["weight_map"]
        shards = sorted(set(homes.values()))
    except (ValueError, LookupError, TypeError, AttributeError, OSError) as error:
        raise _bad(
            index, f"expected a JSON object with a weight_map of names: {error!r}"
        ) from error
    if outside := [name for name in shards if not isinstance(name, str) or Path(name).name != name]:
        raise _bad(index, f"expected names of files beside it, got {outside}")
    checkpoint = Checkpoint(path, [path / name for name in shards])
    if difference := sorted(homes.keys() ^ set(checkpoint)):
        checkpoint.close()
        raise _bad(index, f"the index and the files disagree about {difference[:8]}")
    return checkpoint


def _opened(path: Path) -> Any:
    try:
        file = safe_open(path, framework="np")
    except FileNotFoundError as error:
        beside = path.parent.iterdir() if path.parent.is_dir() else ()
        raise _bad(path, "no such file", nearest(path.name, [p.name for p in beside])) from error
    except (SafetensorError, OSError) as error:
        size = path.stat().st_size
        reason = f"not a whole safetensors file ({size} bytes): {error}"
        raise _bad(path, reason) from error
    try:
        _check_header(path)
    except ValueError as error:
        file.__exit__(None, None, None)
        raise _bad(path, f"not a sound safetensors header: {error}") from error
    return file


def _check_header(path: Path) -> None:
    """Refuse names that occur twice: the format's own reader keeps one of them silently."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        json.loads(file.read(length), object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"named more than once: {twice}")
    return made


def _storable(tensors: Mapping[str, Any]) -> dict[str, np.ndarray]:
    arrays, problems = {}, []
    for key, tensor in tensors.items():
        if not isinstance(key, str):
            text = f"expected a string as key, got {type(key).__name__}"
            problems.append(Problem("unreadable", str(key), text))
            continue
        try:
            array = as_numpy(tensor, key)
        except TransferError as error:
            problems += error.problems
            continue
        if (dtype := describe(array).dtype) not in _DTYPES.values():
            text = f"expected one of {', '.join(_DTYPES.values())}, got {dtype}"
            problems.append(Problem("wrong dtype", key, text))
        # safetensors writes memory as it lies, whatever the strides say
        arrays[key] = np.require(array, requirements="C")
    if problems:
        raise TransferError("saving a checkpoint", problems)
    return arrays


def _flush(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _bad(path: Path, reason: str, hint: str = "") -> TransferError:
    return TransferError(f"checkpoint {path}", [Problem("file", str(path), reason, hint)])
