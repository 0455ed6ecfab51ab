"""Measure the most resident memory that a call holds, by one method for every framework."""

import contextlib
import ctypes
import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jax_attn.environment import free_memory

_M_ARENA_MAX = -8  # malloc.h
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def available() -> int:
    """Return the bytes available without swapping, or half of all memory if that is unknown."""
    return free_memory() or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def one_arena() -> None:
    """Make malloc keep one heap instead of one per thread; call this before frameworks start.

    Only the main heap can be trimmed completely. Memory that other heaps keep would serve the next
    call unseen, so its measured peak would be too low.
    """
    _glibc("mallopt", _M_ARENA_MAX, 1)


def peak_during(call: Callable[[], Any]) -> int | None:
    """Return the most bytes resident during `call`, with its result, beyond those before it.

    Memory that the allocator keeps from earlier calls is released first, because it would hide what
    this call needs. Returns None if neither Linux's high-water mark nor psutil is available.
    """
    gc.collect()
    _glibc("malloc_trim", 0)
    if _resets():
        before = _kilobytes(_STATUS, "VmRSS")
        kept = call()
        peak = _kilobytes(_STATUS, "VmHWM")
        del kept
        return max(peak - before, 0)
    return _sampled(call)


def _glibc(function: str, *numbers: int) -> None:
    """Call a function of glibc; do nothing if the C library lacks it."""
    with contextlib.suppress(AttributeError, OSError, TypeError):
        getattr(ctypes.CDLL(None), function)(*numbers)


def _resets() -> bool:
    """Reset the high-water mark to the resident memory; return whether the system allows it."""
    try:
        _CLEAR.write_text("5")
    except OSError:
        return False
    return True


def _sampled(call: Callable[[], Any]) -> int | None:
    try:
        import psutil
    except ImportError:
        return None
    process, done = psutil.Process(), threading.Event()
    before = process.memory_info().rss
    seen = [before]

    def watch() -> None:
        while not done.wait(0.001):
            seen.append(process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        kept = call()
        seen.append(process.memory_info().rss)
        del kept
    finally:
        done.set()
        watcher.join()
    return max(seen) - before


def _kilobytes(file: Path, name: str) -> int:
    """Return the value of a line `name:   123 kB`, in bytes."""
    line = next(x for x in file.read_text().splitlines() if x.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024
