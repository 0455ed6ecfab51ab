"""The hidden folder in which a port is made, and those that killed ports have left behind.

It lies beside its target and is renamed when everything is on the disk, so that an interrupted
port never looks whole. While its port runs it is locked; the lock ends with the process.
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
    """A hidden folder. seconds: how old it is. at_work: whether its port still runs."""

    folder: Path
    seconds: float
    at_work: bool


@contextmanager
def staged(target: Path) -> Iterator[Path]:
    """A hidden folder that becomes `target` when the block ends well, and is deleted otherwise, as
    are the parents that `target` lacked.

    Raises TransferError for what the disk refuses, and where `target` was created meanwhile.
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
        for folder in absent:  # empty unless the block ended well
            with suppress(OSError):
                folder.rmdir()


def leftovers(target: Path) -> list[Leftover]:
    """The hidden folders of other ports to `target`, oldest first."""
    folders = []
    with suppress(OSError):  # no folder to look into: the target is refused for that
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
    """Delete the folder, unless its port still runs; whether it was deleted.

    Raises TransferError for what the disk refuses.
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
    """Lock a folder, and yield whether it worked: another process may hold the lock, and some disks
    have none.

    wait: whether to wait for the other process, which locks a folder for as long as it looks at it.
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
    """How the hidden folder's name begins; a long name is cut, to leave room for what follows."""
    name = target.name
    if len(name) > 50:
        name = f"{name[:41]}-{hashlib.sha256(os.fsencode(name)).hexdigest()[:8]}"
    return f".{name}."


def _renamed(error: TransferError, hidden: Path, target: Path) -> TransferError:
    """An error about the hidden folder, as one about the folder that the caller named."""

    def rename(text: str) -> str:
        return text.replace(str(hidden), str(target))

    return TransferError(rename(error.doing), [Problem(*map(rename, p)) for p in error.problems])
