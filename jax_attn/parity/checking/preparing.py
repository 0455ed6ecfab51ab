"""Prepare a torch module's side of a check: the only part of a check that needs torch."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from jax_attn.environment import free_memory
from jax_attn.parity.checking.arguments import output_problems
from jax_attn.parity.checking.fixed import chosen
from jax_attn.parity.checking.prepared import NARROW, Prepared
from jax_attn.parity.checking.questions import QUESTIONS
from jax_attn.parity.judge.budget import RUNS
from jax_attn.parity.run.inputs_and_runs import Inputs, RaisedError
from jax_attn.parity.run.reference import Reference, Runs
from jax_attn.progress import TimeLeft, counting


def prepare_module(
    module: torch.nn.Module,
    inputs: Inputs,
    call: Callable[..., Any] | None,
    dtype: str,
    gradients: bool,
    seed: int,
    parameters: str | Sequence[str] | None,
    others: tuple[Inputs, ...] = (),
    canaries: frozenset[str] | None = None,
) -> Prepared:
    """Prepare a torch module; the arguments are those of `check`, and of the right types.

    others: the other inputs of the same check. canaries: as for `Prepared`.

    Raises TypeError or ValueError as `chosen` and `prepare` do.
    """
    names = [name for name, _ in module.named_parameters()]
    wanted = None if parameters is None else chosen(names, parameters)
    called = Reference(module, call, inputs, wanted, others)
    return prepare(called, dtype, gradients=gradients, seed=seed, canaries=canaries)


def prepare(
    reference: Reference,
    dtype: str,
    *,
    gradients: bool,
    seed: int,
    canaries: frozenset[str] | None = None,
) -> Prepared:
    """Prepare the reference's side of a check; each part of it is computed when it is first needed.

    Raises ValueError if the reference's outputs cannot be compared, or differ from call to call.
    """
    is_large = sum(p.numel() for p in reference.module.parameters()) > _LARGE
    prepared = Prepared(
        reference,
        dtype,
        gradients=gradients,
        seed=seed,
        watch=shown,
        runs=FEWER_RUNS if is_large else RUNS,
        as_jax=is_large and dtype in NARROW,
        questions=QUESTIONS,
        canaries=canaries,
    )
    with _ids_named(reference):
        outputs = prepared.inference
    if problems := output_problems(reference, outputs):
        raise ValueError("\n".join(problems))
    if not reference.repeats(dtype, outputs):
        raise ValueError(
            "reference: expected the same outputs each time, got different ones on the same "
            "inputs; if it is in training mode, with dropout, call .eval() first"
        )
    announce_memory(reference.module, reference.parameters)
    return prepared


_LARGE, FEWER_RUNS = 2**24, 12
"""A run of a module with more than _LARGE parameters takes seconds, so its budgets are derived from
fewer runs; in a narrow dtype, only budgets that allow for what JAX stores are derived."""


@contextlib.contextmanager
def _ids_named(reference: Reference) -> Iterator[None]:
    """Add to an index error of a run the integer inputs that lie outside of an embedding's rows.

    They are searched only after an error, because it is unknown which input goes to which
    embedding.
    """
    try:
        yield
    except RaisedError as error:
        outside = list(_outside(reference)) if isinstance(error.__cause__, IndexError) else []
        if not outside:
            raise
        raise RaisedError("; ".join([str(error), *outside])) from error.__cause__


def _outside(reference: Reference) -> Iterator[str]:
    for label, a in reference.inputs.by_name.items():
        if a.dtype.kind not in "iu" or not a.size:
            continue
        for name, table in reference.module.named_modules():
            rows = table.num_embeddings if isinstance(table, torch.nn.Embedding) else 0
            if rows and not 0 <= a.min() <= a.max() < rows:
                yield (
                    f"input {label!r} holds {a.min()} to {a.max()}, but the embedding {name!r} "
                    f"has rows 0 to {rows - 1}"
                )


# --- announced on stderr: a check that takes long or needs much of the memory --------------------

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
