"""What a check will take, said on stderr where that is long or much of the memory."""

import sys
import time
from itertools import islice

import torch

from jax_attn.environment import free_memory
from jax_attn.parity.run.reference import Runs
from jax_attn.progress import counting

# Bytes a parameter: the copy in float64; where its gradient is compared, the gradients of two
# runs, the centre's, their sums of squares and budgets, the squares of products; then the port's.
# BERT of 109 million parameters takes 55.
_BYTES, _BYTES_COMPARED = 8, 47
_LONG = 20.0


def shown(runs: Runs, total: int) -> Runs:
    """The runs as they come; on stderr how many, where those after the first will take long.

    They take the first's time each, or less: two may be made at once.
    """
    begun = time.perf_counter()
    yield from islice(runs, 1)
    seconds = (total - 1) * (time.perf_counter() - begun)
    if seconds <= _LONG:
        yield from runs
        return
    said = f"parity.check: {total - 1} more perturbed runs, up to {seconds:.0f} s"
    print(f"{said}; then canaries and the port's runs", file=sys.stderr, flush=True)
    done = 1
    with counting("parity.check: perturbed runs", total) as show:
        show(done)
        for run in runs:
            yield run
            del run  # before the next one is made
            done += 1
            show(done)


def announce_memory(module: torch.nn.Module, names: frozenset[str] | None = None) -> None:
    """One line on stderr, where the check of a module will take half of the free memory.

    names: the parameters whose gradients are compared; None: all.
    """
    sizes = {name: p.numel() for name, p in module.named_parameters()}
    compared = sum(n for name, n in sizes.items() if names is None or name in names)
    if line := memory(sum(sizes.values()), compared, free_memory()):
        print(line, file=sys.stderr, flush=True)


def memory(parameters: int, compared: int, free: int | None) -> str | None:
    """What to say of a check of so many parameters; None of a small one.

    compared: those whose gradients are. free: bytes of memory, None where that is not known.
    """
    needs = _BYTES * parameters + _BYTES_COMPARED * compared
    if free is None or needs <= free / 2:
        return None
    return (
        f"parity.check: about {needs / 2**30:.1f} GiB of the {free / 2**30:.1f} GiB that are free; "
        "parameters= limits the gradients that are compared"
    )
