"""Orbax checkpoints of a state flattened by dotted paths: nested dicts, an array a leaf.

    with ocp.StandardCheckpointer() as orbax:
        state = nnx.restore_int_paths(orbax.restore(folder))

Only this file imports orbax, and jax with it.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

from jax_attn.transfer.arrays import Spec, as_numpy, specs
from jax_attn.transfer.files.changed_files import Stamps, stamped
from jax_attn.transfer.problems import Problem, TransferError, file_error


class OrbaxFolder(Mapping[str, np.ndarray]):
    """Dotted paths to NumPy arrays, each read when it is asked for. Made by `load`.

    stamps: its files as they were when it was opened. Raises TransferError for what orbax does
    not read.
    """

    def __init__(self, folder: Path, leaves: Mapping[str, Spec], stamps: Stamps):
        self.path, self.stamps, self._leaves = folder, stamps, dict(leaves)

    def __getitem__(self, path: str) -> np.ndarray:
        self._leaves[path]
        item, how = _nested({path: 0}), {path: ocp.RestoreArgs(restore_type=np.ndarray)}
        try:
            with ocp.PyTreeCheckpointer() as orbax:
                found: Any = orbax.restore(
                    self.path.absolute(), item=item, restore_args=_nested(how), partial_restore=True
                )
        except Exception as error:  # orbax raises whatever its parts raise
            text = f"orbax does not read it: {_reason(error)}"
            raise TransferError(
                f"reading {self.path}", [Problem("unreadable", path, text)]
            ) from error
        for part in path.split("."):
            found = found[part]
        return as_numpy(found, path)

    def __iter__(self) -> Iterator[str]:
        return iter(self._leaves)

    def __len__(self) -> int:
        return len(self._leaves)

    def describe(self, path: str) -> Spec:
        """Shape and dtype name of one array, without reading it."""
        return self._leaves[path]


def load(folder: Path) -> OrbaxFolder:
    """The arrays of an orbax checkpoint. Raises TransferError for what orbax does not read."""
    stamps = stamped(path for path in sorted(folder.rglob("*")) if path.is_file())
    try:
        with ocp.PyTreeCheckpointer() as orbax:
            tree = orbax.metadata(folder.absolute()).item_metadata.tree
        leaves = {path: Spec(tuple(m.shape), m.dtype.name) for path, m in _flat(tree)}
    except Exception as error:  # orbax raises whatever its parts raise
        raise file_error(folder, f"orbax does not read it: {_reason(error)}") from error
    return OrbaxFolder(folder, leaves, stamps)


def save(folder: Path, tensors: Mapping[str, Any]) -> None:
    """Write arrays by dotted path. Raises TransferError for what orbax does not hold.

    tensors: all of them stay in memory while orbax writes, but for views of a mapped file.
    """
    found, problems = specs(tensors)
    for path, spec in found.items():
        if 0 in spec.shape:
            text = f"expected numbers, as orbax saves no empty array, got {spec}"
            problems.append(Problem("wrong shape", path, text))
        parents = [path[:i] for i, letter in enumerate(path) if letter == "."]
        if clash := [parent for parent in parents if parent in found]:
            text = f"expected a leaf or a branch, {clash[0]!r} is both"
            problems.append(Problem("ambiguous", path, text))
    if problems:
        raise TransferError("saving with orbax", problems)
    made = _nested({path: tensors[path] for path in tensors})
    try:
        with ocp.PyTreeCheckpointer() as orbax:
            orbax.save(folder.absolute(), made)
    except Exception as error:  # orbax raises whatever its parts raise
        raise file_error(folder, f"orbax does not write it: {error}") from error


def _reason(error: Exception) -> str:
    """What went wrong, without the files and lines of orbax's own code that follow."""
    return (str(error).strip() or type(error).__name__).split("\n")[0]


def _nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *parents, last = path.split(".")
        inner = made
        for part in parents:
            inner = inner.setdefault(part, {})
        inner[last] = leaf
    return made


def _flat(tree: Mapping[str, Any], stem: str = "") -> Iterator[tuple[str, Any]]:
    for name, inner in tree.items():
        if isinstance(inner, Mapping):
            yield from _flat(inner, f"{stem}{name}.")
        else:
            yield f"{stem}{name}", inner
