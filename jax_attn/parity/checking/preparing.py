"""Prepare a torch module's side of a check: the only part of a check that needs torch."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from jax_attn.parity.checking.arguments import output_problems
from jax_attn.parity.checking.estimate import announce_memory, shown
from jax_attn.parity.checking.fixed import chosen
from jax_attn.parity.checking.prepared import NARROW, Prepared
from jax_attn.parity.checking.questions import QUESTIONS
from jax_attn.parity.judge.budget import RUNS
from jax_attn.parity.run.inputs_and_runs import Inputs, RaisedError
from jax_attn.parity.run.reference import Reference


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
