"""The most resident memory that a call holds, by one method for every framework."""

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
    """Bytes that can be had without swapping, or half of all where the system does not say."""
    return free_memory() or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def one_arena() -> None:
    """Make malloc keep one heap instead of one per thread; call it before frameworks start.

    Only that heap can be trimmed whole. What other heaps keep would serve the next call unseen,
    and its peak would come out too low.
    """
    _glibc("mallopt", _M_ARENA_MAX, 1)


def peak_during(call: Callable[[], Any]) -> int | None:
    """The most bytes resident during `call`, its result included, beyond those before it.

    What the allocator keeps of earlier calls is released first, because it would hide what this
    one needs. None if neither Linux's high-water mark nor psutil is available.
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
    """Call a function of glibc; another C library may lack it."""
    with contextlib.suppress(AttributeError, OSError, TypeError):
        getattr(ctypes.CDLL(None), function)(*numbers)


def _resets() -> bool:
    """Whether the high-water mark falls to what is resident now."""
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
    """The bytes of a line `name:   123 kB`."""
    line = next(x for x in file.read_text().splitlines() if x.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024
