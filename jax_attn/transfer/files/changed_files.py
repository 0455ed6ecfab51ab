"""Detection of files that changed after they were opened."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from jax_attn.transfer.problems import Problem


class Stamp(NamedTuple):
    """File properties that change when the file is written or replaced.

    size: bytes; modified: nanoseconds.
    """

    inode: int
    size: int
    modified: int


Stamps = Mapping[Path, Stamp | None]


def stamped(paths: Iterable[Path]) -> dict[Path, Stamp | None]:
    """Return each file's stamp; None for a file that does not exist."""
    return {path: _stamp(path) for path in paths}


def changed(stamps: Stamps) -> list[Problem]:
    """Report each file that has changed since its stamp."""
    return [
        Problem(
            "file", str(path), f"expected no change since it was opened: {_difference(was, now)}"
        )
        for path, was in stamps.items()
        if (now := _stamp(path)) != was
    ]


def cut(path: Path, was: Stamp | None) -> str:
    """Say why reading mapped bytes of a file could end the process, because they are gone; or ''.

    A file that was replaced by another keeps its bytes for processes that have it open.
    """
    now = _stamp(path)
    shorter = was and now and now.inode == was.inode and now.size < was.size
    return f"{path} {_difference(was, now)}" if shorter else ""


def _stamp(path: Path) -> Stamp | None:
    try:
        status = os.stat(path)
    except (OSError, ValueError):  # ValueError: a name that no file can have
        return None
    return Stamp(status.st_ino, status.st_size, status.st_mtime_ns)


def _difference(was: Stamp | None, now: Stamp | None) -> str:
    if was is None or now is None:
        return "it was not there" if was is None else "it is gone"
    if was.size != now.size:
        return f"was {was.size} bytes, is now {now.size}"
    return "another file has its name" if was.inode != now.inode else "it was written to"
