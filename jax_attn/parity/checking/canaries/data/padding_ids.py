"""Canary of ids without padding, if the reference treats it specially (RoBERTa's positions)."""

from functools import partial

import numpy as np
import torch

from jax_attn.parity.bugs.planting import run_planted
from jax_attn.parity.bugs.tensors import named_inputs, with_inputs, with_tensors
from jax_attn.parity.checking.canaries.findings import DoubtsAndNotes
from jax_attn.parity.checking.canaries.seen import same
from jax_attn.parity.checking.prepared import Prepared
from jax_attn.parity.judge.finding import findings
from jax_attn.parity.run.inputs_and_runs import Run
from jax_attn.parity.run.modes.float64_mode import Float64


def try_padding_ids(prepared: Prepared) -> DoubtsAndNotes:
    """Note ids without their embedding's padding id if the reference treats that id specially.

    If two ids are exchanged, and their rows of the embedding too, the outputs stay the same, unless
    one of the ids has a meaning beyond its row.
    """
    notes = []
    for path, table in prepared.reference.module.named_modules():
        if not isinstance(table, torch.nn.Embedding) or (pad := table.padding_idx) is None:
            continue
        for name, ids in named_inputs(prepared.reference).items():
            if ids.dtype.kind not in "iu" or ids.size == 0 or (ids == pad).any():
                continue
            used = int(ids.flat[ids.size // 2])
            exchanged = partial(_exchanged, prepared, path, name, used)
            other = next((i for i in range(len(table.weight)) if i not in (pad, used)), used)
            if _is_same(prepared, exchanged(other)) and _differs(prepared, exchanged(pad)):
                notes.append(
                    f"no id of input {name!r} is {pad}, the padding of `{path}`, which the "
                    "reference treats apart from other ids, so what the port makes of it was not "
                    f"checked; to show it, use rows that end in some ids of {pad}"
                )
    return DoubtsAndNotes((), findings("no-padding", notes))


def _exchanged(prepared: Prepared, path: str, name: str, a: int, b: int) -> Run | None:
    """Run the reference with ids `a` and `b` exchanged, and rows `a` and `b` of one embedding."""
    ids = named_inputs(prepared.reference)[name]
    others = np.where(ids == a, b, np.where(ids == b, a, ids))

    def rows(table: torch.Tensor) -> torch.Tensor:
        table[[a, b]] = table[[b, a]]
        return table

    reference = with_tensors(prepared.reference, {f"{path}.weight".removeprefix("."): rows})
    return run_planted(with_inputs(reference, {name: others}), Float64())


def _is_same(prepared: Prepared, run: Run | None) -> bool:
    exact = prepared.exact.kinds["output"]
    return run is not None and all(
        got.shape == exact[name].shape and same(got, exact[name])
        for name, got in run.kinds["output"].items()
    )


def _differs(prepared: Prepared, run: Run | None) -> bool:
    return run is not None and prepared.would_fail(run)
