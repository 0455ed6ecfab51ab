"""What a check will take, said on stderr where that is long or much of the memory."""

import contextlib
import sys

import torch

from jax_attn.environment import free_memory
from jax_attn.parity.run.reference import Runs
from jax_attn.progress import TimeLeft, counting

# Bytes a parameter: the copy in float64; where its gradient is compared, the gradients of two
# runs, the centre's, their sums of squares and budgets, the squares of products; then the port's.
# BERT of 109 million parameters takes 55.
_BYTES, _BYTES_COMPARED = 8, 47
_LONG = 20.0


def shown(runs: Runs, total: int) -> Runs:
    """The runs as they come; on stderr how many, once it is known that those left take long.

    That is by the pace of all after the first, which loads what the others find loaded. Two may
    come at a time, or all of them.
    """
    left, done, show = TimeLeft(total), 0, None
    with contextlib.ExitStack() as stack:
        for run in runs:
            yield run
            del run  # before the next one is made
            done += 1
            if show:
                show(done)
                continue
            left.done(done)
            if (seconds := left.seconds) is not None and seconds > _LONG:
                said = f"parity.check: {total - done} more perturbed runs, about {seconds:.0f} s"
                print(f"{said}; then canaries and the port's runs", file=sys.stderr, flush=True)
                show = stack.enter_context(counting("parity.check: perturbed runs", total, left))


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
