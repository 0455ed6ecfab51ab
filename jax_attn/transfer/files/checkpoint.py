"""Checkpoints as lazy mappings: a file, a folder, or shards with the index that names them.

Needs no framework, except torch for torch's own pickle files.
"""

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jax_attn.transfer import arrays
from jax_attn.transfer.arrays import LazyMapping, Spec
from jax_attn.transfer.files import pickled, safetensors_file
from jax_attn.transfer.files.changed_files import Stamp, Stamps, cut, stamped
from jax_attn.transfer.files.json_file import read_json
from jax_attn.transfer.files.local import expect_local
from jax_attn.transfer.problems import PROBLEMS_SHOWN, Problem, TransferError, file_error, nearest

INDEX = ".index.json"
_SAFETENSORS = ".safetensors"
_SUFFIXES = (_SAFETENSORS, *pickled.SUFFIXES)
USUAL = ("model.safetensors", "model.safetensors.index.json")
"""The files of a folder that transformers reads, the first that there is; others are left out."""
_OF_MANY = re.compile(r"(.*)-\d{1,9}-of-(\d{1,9})(\.\w+)")

Views = dict[str, Any]
"""Views of a mapped file, torch tensors, or a Spec if NumPy lacks the dtype."""


class _File(NamedTuple):
    """Tensors of one file, and those tied to them. stamp: its state before it was opened."""

    stamp: Stamp | None
    stored: Views
    tied: Views


class Checkpoint(LazyMapping[np.ndarray]):
    """A lazy mapping of torch keys to NumPy arrays, each read when it is used.

    The arrays are copies; bfloat16 is ml_dtypes'. Use it as a context manager; after closing,
    nothing can be read. `load_checkpoint` returns it.

    Attributes:
      stamps: the state of its files when they were opened.
      left_out: the names of other files of safetensors in its folder, which transformers does not
        read either.
    """

    left_out: tuple[str, ...] = ()

    def __init__(
        self, path: Path, tensors: Mapping[str, Any], homes: Mapping[str, Path], stamps: Stamps
    ) -> None:
        super().__init__(tensors)
        self.path, self.stamps = path, stamps
        self._tensors, self._homes = dict(tensors), homes
        self._open = True

    def __getitem__(self, key: str) -> np.ndarray:
        return np.array(self.mapped(key), order="C")

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r}, {len(self)} tensors)"

    def mapped(self, key: str) -> np.ndarray:
        """Return one tensor's mapped bytes: uncopied and read-only, for immediate use.

        It changes if someone overwrites the file. Raises TransferError, also if the file has been
        truncated.
        """
        spec = self.describe(key)
        tensor = self._tensors[key]
        if isinstance(tensor, Spec):
            known = ", ".join(safetensors_file.DTYPE_OF_CODE.values())
            text = f"expected one of {known}, got {spec.dtype}"
            raise self._unreadable(key, text)
        home = self._homes[key]
        if text := cut(home, self.stamps[home]):
            raise self._unreadable(key, text)
        array = arrays.as_numpy(tensor, key).view()
        array.flags.writeable = False
        return array

    def describe(self, key: str) -> Spec:
        """Return shape and dtype name of one tensor, without reading it. Raises TransferError."""
        tensor = self._tensors[key]
        if not self._open:
            raise self._unreadable(key, "the checkpoint is closed")
        if isinstance(tensor, Spec):
            return tensor
        if reason := arrays.why_unreadable(tensor):
            raise self._unreadable(key, reason)
        spec, stamp = arrays.describe(tensor), self.stamps[self._homes[key]]
        if stamp is not None and spec.nbytes > stamp.size:
            text = f"expected no more than the {stamp.size:,} bytes of its file, got {spec}"
            why = "which repeats one stored value; save it with .contiguous(), or leave it out"
            raise self._unreadable(key, f"{text} of {spec.nbytes:,} bytes, {why}")
        return spec

    def tied(self) -> dict[str, str]:
        """Map each key whose tensor occupies an earlier key's memory to that earlier key."""
        described, _ = arrays.specs(self)
        readable = [key for key in described if not isinstance(self._tensors[key], Spec)]
        return arrays.same_memory(self._tensors, readable)

    def close(self) -> None:
        """Release the files; arrays already read stay valid."""
        self._tensors = dict.fromkeys(self._tensors)
        self._open = False

    def _unreadable(self, key: str, text: str) -> TransferError:
        return TransferError(f"reading {self.path}", [Problem("unreadable", key, text)])


def load_checkpoint(path: str | os.PathLike[str], *, part: str | None = None) -> Checkpoint:
    """Open the tensors of a checkpoint as a lazy mapping; only headers are read.

    An index names files in its own folder. Links are followed everywhere, because caches consist of
    links.

    Args:
      path: a .safetensors file; a .bin, .pt, .pth or .ckpt file (torch's pickle, which needs torch
        2.10 and is read as weights only); an index (`*.index.json`) of such files, or the name of
        the index without ".index.json"; or a folder that has one of them. From a folder,
        model.safetensors is read, or model.safetensors.index.json if that is missing, as by
        transformers; `Checkpoint.left_out` names the other files. In a folder with neither,
        safetensors take precedence over pickles, and an index over single files.
      part: the key of the tensors, such as "state_dict", in a pickle that holds other values too;
        "state.model" for a key within a key, and "" for the file itself.

    Returns:
      A `Checkpoint`, which is a context manager.

    Raises:
      TransferError: a file is missing, truncated, unsafe or not what its name says, a tensor is
        named twice, or an index disagrees with its files; all reasons are listed. Also for a name
        on the Hub and for an adapter, with the command that helps.
    """
    if not (part is None or isinstance(part, str)):
        raise TypeError(f"part: expected a string or None, got {part!r}")
    if not os.fspath(path):
        raise ValueError("path: expected a file or a folder, got an empty name")
    path = Path(path)
    expect_local(path)
    if os.path.isdir(path):
        return _load_folder(path, part)
    if path.name.endswith(INDEX):
        return _load_index(path, part)
    index = path.with_name(path.name + INDEX)
    if not os.path.lexists(path) and os.path.isfile(index):
        return _load_index(index, part)
    return _joined(path, [path], part)


def _load_folder(folder: Path, part: str | None) -> Checkpoint:
    try:
        names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
    except OSError as error:
        raise file_error(folder, f"cannot be listed: {error}") from error

    def ending(*suffixes: str) -> list[str]:
        return [name for name in names if name.endswith(suffixes)]

    for file in USUAL:
        if file in names:
            path = folder / file
            is_index = file.endswith(INDEX)
            checkpoint = _load_index(path, part) if is_index else _joined(path, [path], part)
            read = {each.name for each in checkpoint.stamps}
            every = ending(_SAFETENSORS, _SAFETENSORS + INDEX)
            checkpoint.left_out = tuple(name for name in every if name not in read)
            return checkpoint
    if indices := ending(_SAFETENSORS + INDEX):
        return _load_index(_only(folder, indices), part)
    if files := ending(_SAFETENSORS):
        if of_many := [name for name in files if _OF_MANY.fullmatch(name)]:
            text = f"expected an index of these shards, got {of_many[:8]} without one"
            raise file_error(folder, text, "an unfinished copy? a single file can be read by name")
        return _joined(folder, [folder / name for name in files], part)
    if indices := ending(INDEX):
        return _load_index(_only(folder, indices), part)
    if pickles := ending(*pickled.SUFFIXES):
        usual = [name for name in pickles if name == "pytorch_model.bin"]
        return _joined(folder, [_only(folder, usual or pickles)], part)
    raise file_error(folder, f"expected *.safetensors or *.bin in the folder, got {names[:8]}")


def _only(folder: Path, names: list[str]) -> Path:
    if len(names) > 1:
        text = f"expected one checkpoint in the folder, got {names[:8]}"
        raise file_error(folder, text, "pass the path of one of them")
    return folder / names[0]


def _joined(path: Path, files: Iterable[Path], part: str | None) -> Checkpoint:
    """Return all tensors of some files."""
    tensors: Views = {}
    problems = []
    contents = _read(path, files, part)
    for file, (_, stored, tied) in contents.items():
        twice = sorted(tensors.keys() & (stored.keys() | tied.keys()))
        text = f"expected in one file, got it in several, {file.name} among them"
        problems += [Problem("ambiguous", key, text) for key in twice]
        tensors |= stored | tied
    if problems:
        raise TransferError(f"checkpoint {path}", problems)
    return _checkpoint(path, tensors, contents)


def _load_index(index: Path, part: str | None) -> Checkpoint:
    """Return the tensors that an index names, each from its file; the files hold no others."""
    own = stamped([index])
    homes = _weight_map(index)
    files = _read(index, [index.with_name(name) for name in sorted({*homes.values()})], part)
    holders = {key: file.name for file, (_, stored, _) in files.items() for key in stored}
    tensors: Views = {}
    problems: list[Problem] = []

    def problem(kind: str, key: str, text: str, others: Iterable[str]) -> None:
        hint = nearest(key, others) if len(problems) < PROBLEMS_SHOWN else ""
        problems.append(Problem(kind, key, text, hint))

    for key, name in homes.items():
        _, stored, tied = files[index.with_name(name)]
        if key in stored or key in tied:
            tensors[key] = stored[key] if key in stored else tied[key]
        else:
            got = f"it in {holders[key]}" if key in holders else "no such tensor"
            problem("missing", key, f"expected in {name}, as {index.name} says, got {got}", stored)
    for file, (_, stored, tied) in files.items():
        for key in stored:
            if homes.get(key) != file.name and (key in tensors or key not in homes):
                text = f"expected in {file.name} only what {index.name} places there, got it too"
                problem("unexpected", key, text, homes)
        tensors |= {key: tensor for key, tensor in tied.items() if key not in homes}
    if problems:
        raise TransferError(f"checkpoint {index}", problems)
    return _checkpoint(index, tensors, files, own)


def _checkpoint(
    path: Path, tensors: Views, files: Mapping[Path, _File], beside: Stamps | None = None
) -> Checkpoint:
    homes = {
        key: file
        for file, held in files.items()
        for key, tensor in (*held.tied.items(), *held.stored.items())
        if tensors.get(key) is tensor
    }
    stamps = {file: held.stamp for file, held in files.items()}
    return Checkpoint(path, tensors, homes, {**(beside or {}), **stamps})


def _weight_map(index: Path) -> dict[str, str]:
    """Return the map of an index: key -> name of a file in the same folder."""
    try:
        homes = read_json(index)["weight_map"]
        items = sorted(homes.items())
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OSError) as error:
        text = f"expected a JSON object with a weight_map of names: {error!r}"
        raise file_error(index, text) from error
    problems = []
    for key, name in items:
        if not (isinstance(name, str) and Path(name).name == name and name.endswith(_SUFFIXES)):
            text = f"expected the name of a file next to it ({', '.join(_SUFFIXES)}), got {name!r}"
            problems.append(Problem("file", str(index), f"{key!r}: {text}"))
    if not items:
        problems.append(Problem("file", str(index), "expected at least one name, got none"))
    if problems or (problems := _left_out(index, {name for _, name in items})):
        raise TransferError(f"checkpoint {index}", problems)
    return dict(items)


def _left_out(index: Path, names: Iterable[str]) -> list[Problem]:
    """Report series of files, numbered 1-of-n to n-of-n, that an index names only in part."""
    series: dict[tuple[str, ...], list[str]] = {}
    for name in sorted(names):
        if match := _OF_MANY.fullmatch(name):
            series.setdefault(match.groups(), []).append(name)
    return [
        Problem("file", str(index), f"expected {int(count)} files named alike, got {members[:8]}")
        for (_, count, _), members in series.items()
        if len(members) != int(count)
    ]


def _read(path: Path, files: Iterable[Path], part: str | None) -> dict[Path, _File]:
    """Return the contents of each file; raise TransferError with the problems of all."""
    contents, problems = {}, []
    for file, stamp in stamped(files).items():
        try:
            contents[file] = _File(stamp, *_read_file(file, part))
        except TransferError as error:
            problems += error.problems
    if problems:
        raise TransferError(f"checkpoint {path}", problems)
    return contents


def _read_file(path: Path, part: str | None) -> tuple[Views, Views]:
    if path.suffix not in _SUFFIXES:
        expected = f"expected a {', '.join(_SUFFIXES)} or *{INDEX} file, or a folder of them"
        raise file_error(path, f"{expected}, got {path.name!r}")
    if not os.path.isfile(path):  # a pipe or a device could block for ever
        beside = os.listdir(path.parent) if os.path.isdir(path.parent) else []
        text = "not a file" if os.path.lexists(path) else "no such file"
        raise file_error(path, text, nearest(path.name, beside))
    if path.suffix in pickled.SUFFIXES:
        return pickled.tensors(path, part), {}
    if part is not None:
        raise file_error(path, f"part: expected None for safetensors, got {part!r}")
    return safetensors_file.views(path)
