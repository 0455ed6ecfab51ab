"""Files as they were when they were opened, and whether they still are."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from jax_attn.transfer.problems import Problem


class Stamp(NamedTuple):
    """What a file that is written or replaced does not keep. size: bytes; modified: nanoseconds."""

    inode: int
    size: int
    modified: int


Stamps = Mapping[Path, Stamp | None]


def stamped(paths: Iterable[Path]) -> dict[Path, Stamp | None]:
    """Each file's stamp; None where there is none."""
    return {path: _stamp(path) for path in paths}


def changed(stamps: Stamps) -> list[Problem]:
    """Files that are no longer as they were."""
    return [
        Problem(
            "file", str(path), f"expected as it was when it was opened: {_difference(was, now)}"
        )
        for path, was in stamps.items()
        if (now := _stamp(path)) != was
    ]


def cut(path: Path, was: Stamp | None) -> str:
    """Why mapped bytes of a file may be gone, when to look at them ends the process; or ''.

    A file replaced by another keeps its bytes for those who have it open.
    """
    now = _stamp(path)
    shorter = was and now and now.inode == was.inode and now.size < was.size
    return f"{path} {_difference(was, now)}" if shorter else ""


def _stamp(path: Path) -> Stamp | None:
    try:
        found = os.stat(path)
    except (OSError, ValueError):  # the latter for a name that no file can have
        return None
    return Stamp(found.st_ino, found.st_size, found.st_mtime_ns)


def _difference(was: Stamp | None, now: Stamp | None) -> str:
    if was is None or now is None:
        return "it was not there" if was is None else "it is gone"
    if was.size != now.size:
        return f"was {was.size} bytes, is now {now.size}"
    return "another file has its name" if was.inode != now.inode else "it was written to"
