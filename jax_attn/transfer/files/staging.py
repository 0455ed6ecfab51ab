"""The hidden folder in which a port is made, and those that killed ports have left.

It is in the target's parent folder and is renamed once everything is on the disk, so an interrupted
port never looks complete. It is locked while its port runs; the lock ends with the process.
"""

import fcntl
import hashlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from jax_attn.transfer.files.port_folder import refused_target
from jax_attn.transfer.files.writing import flush_folder
from jax_attn.transfer.problems import Problem, TransferError, file_error


class Leftover(NamedTuple):
    """A hidden folder. seconds: its age. at_work: whether its port still runs."""

    folder: Path
    seconds: float
    at_work: bool


@contextmanager
def staged(target: Path) -> Iterator[Path]:
    """Yield a hidden folder, which becomes `target` if the block succeeds.

    Otherwise it is deleted, as are the parents that `target` lacked. Raises TransferError if the
    disk refuses, or if `target` was created meanwhile.
    """
    target = target.absolute()
    partial = target.with_name(f"{_hidden(target)}{secrets.token_hex(4)}.partial")
    absent = [folder for folder in target.parents if not os.path.lexists(folder)]
    try:
        partial.mkdir(parents=True)
        with _locked(partial, wait=True):
            yield partial
            flush_folder(partial)
            if problems := refused_target(target):
                raise TransferError(f"port to {target}", problems)
            partial.rename(target)
        flush_folder(target.parent)
    except OSError as error:
        refused = file_error(target, f"cannot be written: {error}")
        raise _renamed(refused, partial, target) from error
    except TransferError as error:
        raise _renamed(error, partial, target) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        for folder in absent:  # empty unless the block succeeded
            with suppress(OSError):
                folder.rmdir()


def leftovers(target: Path) -> list[Leftover]:
    """Return the hidden folders of other ports to `target`, oldest first."""
    folders = []
    with suppress(OSError):  # no parent folder: the target is refused for that
        target = target.absolute()
        name = re.compile(re.escape(_hidden(target)) + "[0-9a-f]{8}[.]partial")
        for entry in os.scandir(target.parent):
            if name.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                with suppress(FileNotFoundError):  # its port has ended meanwhile
                    age = time.time() - entry.stat(follow_symlinks=False).st_mtime
                    with _locked(Path(entry.path)) as alone:
                        folders.append(Leftover(Path(entry.path), max(age, 0), not alone))
    return sorted(folders, key=lambda leftover: -leftover.seconds)


def remove(leftover: Leftover) -> bool:
    """Delete the folder unless its port still runs; return whether it was deleted.

    Raises TransferError if the disk refuses.
    """
    try:
        with _locked(leftover.folder) as alone:
            if alone:
                shutil.rmtree(leftover.folder)
        return alone
    except OSError as error:
        raise file_error(leftover.folder, f"cannot be removed: {error}") from error


@contextmanager
def _locked(folder: Path, wait: bool = False) -> Iterator[bool]:
    """Lock a folder, and yield whether that worked.

    Another process may hold the lock, and some disks have none. wait: whether to wait for the other
    process, which also locks a folder while it inspects it.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


def _hidden(target: Path) -> str:
    """Return how the hidden folder's name begins; long names are shortened to leave room."""
    name = target.name
    if len(name) > 50:
        name = f"{name[:41]}-{hashlib.sha256(os.fsencode(name)).hexdigest()[:8]}"
    return f".{name}."


def _renamed(error: TransferError, hidden: Path, target: Path) -> TransferError:
    """Convert an error about the hidden folder to one about the caller's folder."""

    def rename(text: str) -> str:
        return text.replace(str(hidden), str(target))

    return TransferError(rename(error.doing), [Problem(*map(rename, p)) for p in error.problems])
