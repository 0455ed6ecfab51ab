"""What a check will take, said on stderr before one that takes long or much of the memory."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

# By what is timed, a forward run in float64 and one with gradients: 16 perturbed runs, each of
# about three times the second, then some 15 canaries, mostly forward alone. BERT of 1 and 6 million
# parameters took 37 and 32. What JAX compiles is not in it.
_RUNS = 30
# Bytes a parameter: the copy in float64, one run's gradients, the centre's, their sums of squares
# and budgets; then the port's. BERT of 109 million parameters takes 40.
_BYTES = 40
_LONG = 20.0
_MEMINFO = Path("/proc/meminfo")


def timed(run: Callable[[], object]) -> float:
    """How many seconds one run of the reference takes, without waiting for other programs."""
    begun, worked = time.perf_counter(), time.process_time()
    run()
    return min(time.perf_counter() - begun, time.process_time() - worked)


def announce(module: torch.nn.Module, seconds: float) -> None:
    """One line on stderr, where the whole check will be long or large; seconds: of one run."""
    if line := estimate(sum(p.numel() for p in module.parameters()), seconds, free_memory()):
        print(line, file=sys.stderr, flush=True)


def estimate(parameters: int, seconds: float, free: int | None) -> str | None:
    """What to say of a check of so many parameters; None of a small one.

    seconds: of one run in float64. free: bytes of memory, None where that is not known.
    """
    takes, needs = _RUNS * seconds, _BYTES * parameters
    if takes <= _LONG and (free is None or needs <= free / 2):
        return None
    of = "" if free is None else f" of the {free / 2**30:.1f} GiB that are free"
    return (
        f"parity.check: about {takes:.0f} s and {needs / 2**30:.1f} GiB{of}; "
        "parameters= limits the gradients that are compared"
    )


def free_memory() -> int | None:
    """Bytes that can be had without swapping; None where the system does not say."""
    try:
        lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        return 1024 * int(lines["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError, IndexError):
        return None
