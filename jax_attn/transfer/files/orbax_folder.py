"""Orbax checkpoints of a state flattened by dotted paths: nested dicts with arrays as leaves.

    with ocp.StandardCheckpointer() as orbax:
        state = nnx.restore_int_paths(orbax.restore(folder))

Only this file imports orbax, and jax with it.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

from jax_attn.transfer.arrays import LazyMapping, Spec, Tensors, as_numpy, specs
from jax_attn.transfer.files.changed_files import Stamps, stamped
from jax_attn.transfer.problems import Problem, TransferError, file_error


class OrbaxFolder(LazyMapping[np.ndarray]):
    """Dotted paths to NumPy arrays, each read when it is used. Made by `load`.

    stamps: the state of its files when it was opened. Raises TransferError for an array that orbax
    cannot read.
    """

    def __init__(self, folder: Path, leaves: Mapping[str, Spec], stamps: Stamps) -> None:
        super().__init__(leaves)
        self.path, self.stamps, self._leaves = folder, stamps, dict(leaves)

    def __getitem__(self, path: str) -> np.ndarray:
        self._leaves[path]
        item, how = _nested({path: 0}), {path: ocp.RestoreArgs(restore_type=np.ndarray)}
        try:
            with ocp.PyTreeCheckpointer() as orbax:
                branch: Any = orbax.restore(
                    self.path.absolute(), item=item, restore_args=_nested(how), partial_restore=True
                )
        except Exception as error:  # orbax passes on whatever its parts raise
            text = f"orbax cannot read it: {_reason(error)}"
            raise TransferError(
                f"reading {self.path}", [Problem("unreadable", path, text)]
            ) from error
        for part in path.split("."):
            branch = branch[part]
        return as_numpy(branch, path)

    def describe(self, path: str) -> Spec:
        """Return shape and dtype name of one array, without reading it."""
        return self._leaves[path]


def load(folder: Path) -> OrbaxFolder:
    """Open the arrays of an orbax checkpoint. Raises TransferError if the folder is not one."""
    stamps = stamped(path for path in sorted(folder.rglob("*")) if path.is_file())
    try:
        with ocp.PyTreeCheckpointer() as orbax:
            tree = orbax.metadata(folder.absolute()).item_metadata.tree
        leaves = {path: Spec(tuple(m.shape), m.dtype.name) for path, m in _flat(tree)}
    except Exception as error:  # orbax passes on whatever its parts raise
        raise file_error(folder, f"orbax cannot read it: {_reason(error)}") from error
    return OrbaxFolder(folder, leaves, stamps)


def save(folder: Path, tensors: Tensors) -> None:
    """Write arrays by dotted path. Raises TransferError for arrays that orbax cannot hold.

    tensors: all stay in memory while orbax writes, except views of a mapped file.
    """
    by_path, problems = specs(tensors)
    for path, spec in by_path.items():
        if 0 in spec.shape:
            text = f"expected numbers, because orbax saves no empty array, got {spec}"
            problems.append(Problem("wrong shape", path, text))
        parents = [path[:i] for i, letter in enumerate(path) if letter == "."]
        if clash := [parent for parent in parents if parent in by_path]:
            text = f"expected a leaf or a branch, {clash[0]!r} is both"
            problems.append(Problem("ambiguous", path, text))
    if problems:
        raise TransferError("saving with orbax", problems)
    tree = _nested({path: tensors[path] for path in tensors})
    try:
        with ocp.PyTreeCheckpointer() as orbax:
            orbax.save(folder.absolute(), tree)
    except Exception as error:  # orbax passes on whatever its parts raise
        raise file_error(folder, f"orbax cannot write it: {error}") from error


def _reason(error: Exception) -> str:
    """Return the message without orbax's own files and lines that follow it."""
    return (str(error).strip() or type(error).__name__).split("\n")[0]


def _nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *parents, last = path.split(".")
        inner = tree
        for part in parents:
            inner = inner.setdefault(part, {})
        inner[last] = leaf
    return tree


def _flat(tree: Mapping[str, Any], stem: str = "") -> Iterator[tuple[str, Any]]:
    for name, inner in tree.items():
        if isinstance(inner, Mapping):
            yield from _flat(inner, f"{stem}{name}.")
        else:
            yield f"{stem}{name}", inner
