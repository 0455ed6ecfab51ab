"""Find and end every process that a process started, also those that left its group.

On Linux, this process adopts orphans meanwhile. Elsewhere, only the group is known. A process that
another one starts at the file's request, such as cron or a daemon, is no descendant.
"""

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_SET_ADOPTING, _GET_ADOPTING = 36, 37  # prctl's PR_SET_CHILD_SUBREAPER and PR_GET_CHILD_SUBREAPER
_GET_DUMPABLE, _SET_DUMPABLE = 3, 4  # prctl's PR_GET_DUMPABLE and PR_SET_DUMPABLE
_LOOKS_EVERY = 0.02


@contextlib.contextmanager
def adopting_orphans() -> Iterator[None]:
    """Make this process the parent of orphans among its descendants, in this context."""
    if sys.platform != "linux":
        yield
        return
    libc, before = ctypes.CDLL(None), ctypes.c_int()
    libc.prctl(_GET_ADOPTING, ctypes.byref(before), 0, 0, 0)
    libc.prctl(_SET_ADOPTING, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_SET_ADOPTING, before.value, 0, 0, 0)


@contextlib.contextmanager
def out_of_reach() -> Iterator[None]:
    """Keep processes of the same user from this one's memory and files, in this context.

    On Linux, they can neither trace it nor open its descriptors, unless they are root's.
    """
    if sys.platform != "linux":
        yield
        return
    libc = ctypes.CDLL(None)
    before = libc.prctl(_GET_DUMPABLE, 0, 0, 0, 0)
    libc.prctl(_SET_DUMPABLE, 0, 0, 0, 0)
    try:
        yield
    finally:
        # 2, which an administrator may have set, cannot be set here.
        libc.prctl(_SET_DUMPABLE, int(before == 1), 0, 0, 0)


class Descendants(NamedTuple):
    """The processes of a group, and those that this process adopts.

    group: its number, which is that of its first process. known: children of this process from
    before.
    """

    group: int
    known: frozenset[int]

    def left(self, seconds: float) -> frozenset[int]:
        """Return those that still run after some seconds."""
        end = time.monotonic() + seconds
        while running := self._running():
            if time.monotonic() > end:
                return running
            time.sleep(_LOOKS_EVERY)
        return frozenset()

    def kill(self, seconds: float = 10.0) -> frozenset[int]:
        """End all of them, and return those that still run, if others start as fast as they end.

        Children of one that ends are adopted, and ended too.
        """
        end = time.monotonic() + seconds
        while (running := self._running()) and time.monotonic() < end:
            for process in running:
                _kill(process)
            time.sleep(_LOOKS_EVERY)
        return running

    def _running(self) -> frozenset[int]:
        """Return those that run, after adopted ones that have ended are reaped."""
        if sys.platform != "linux":
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.group, 0)
                return frozenset([-self.group])
            return frozenset()
        running = set()
        for one in processes():
            is_ours = one.parent == os.getpid() and one.number not in self.known
            if one.has_ended and is_ours:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(one.number, os.WNOHANG)
            elif not one.has_ended and (is_ours or one.group == self.group):
                running.add(one.number)
        return frozenset(running)


class Process(NamedTuple):
    """A process of this machine."""

    number: int
    has_ended: bool
    parent: int
    group: int


def processes() -> Iterator[Process]:
    """Yield every process, as Linux tells it; none on other systems."""
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it may end meanwhile
            state, parent, group = file.read_text().rpartition(")")[2].split()[:3]
            yield Process(int(file.parent.name), state in "ZX", int(parent), int(group))


def children() -> frozenset[int]:
    """Return the children of this process."""
    return frozenset(one.number for one in processes() if one.parent == os.getpid())


def _kill(process: int) -> None:
    """End a process, or a group if the number is negative."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(process, signal.SIGKILL)
