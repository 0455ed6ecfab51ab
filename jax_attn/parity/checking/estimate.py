"""Announce on stderr a check that takes long or needs much of the memory."""

import contextlib
import sys

import torch

from jax_attn.environment import free_memory
from jax_attn.parity.run.reference import Runs
from jax_attn.progress import TimeLeft, counting

# Bytes per parameter: the copy in float64; if its gradient is compared, the gradients of two runs
# and of the centre, their sums of squares and budgets, the squares of products; then the port's.
# BERT with 109 million parameters takes 55.
_BYTES, _BYTES_COMPARED = 8, 47
_LONG = 20.0


def shown(runs: Runs, total: int) -> Runs:
    """Yield the runs as they come; show progress on stderr once the rest is known to take long.

    The estimate uses the pace of all runs after the first, which loads what the others find loaded.
    Two runs may come at a time, or all of them.
    """
    left, done, show = TimeLeft(total), 0, None
    with contextlib.ExitStack() as stack:
        for run in runs:
            yield run
            del run  # free it before the next one is made
            done += 1
            if show:
                show(done)
                continue
            left.done(done)
            if (seconds := left.seconds) is not None and seconds > _LONG:
                left_over = f"{total - done} more perturbed runs, about {seconds:.0f} s"
                line = f"parity.check: {left_over}; then canaries and the port's runs"
                print(line, file=sys.stderr, flush=True)
                show = stack.enter_context(counting("parity.check: perturbed runs", total, left))


def announce_memory(module: torch.nn.Module, names: frozenset[str] | None = None) -> None:
    """Print a line on stderr if the check of a module needs more than half of the free memory.

    names: the parameters whose gradients are compared; None stands for all.
    """
    sizes = {name: p.numel() for name, p in module.named_parameters()}
    compared = sum(n for name, n in sizes.items() if names is None or name in names)
    if line := memory(sum(sizes.values()), compared, free_memory()):
        print(line, file=sys.stderr, flush=True)


def memory(parameters: int, compared: int, free: int | None) -> str | None:
    """Return the line on the memory of a check, or None if it needs at most half of `free`.

    parameters: their number. compared: the number of those whose gradients are compared. free:
    bytes of free memory; None if unknown.
    """
    needs = _BYTES * parameters + _BYTES_COMPARED * compared
    if free is None or needs <= free / 2:
        return None
    return (
        f"parity.check: needs about {needs / 2**30:.1f} GiB of {free / 2**30:.1f} GiB that are "
        "free; parameters= limits the gradients that are compared"
    )
