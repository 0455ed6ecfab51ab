"""The two sides' weights, compared bit for bit through the transfer table."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from flax import nnx

from jax_attn.parity.run.inputs_and_runs import Arrays
from jax_attn.transfer import Layout, TransferError, as_numpy, flatten
from jax_attn.transfer.nnx.load import carried

ToTorch = Callable[[Arrays], Arrays]
"""Parameters' gradients by Flax path -> by torch's name, in torch's layout."""


@dataclass(frozen=True)
class WeightComparison:
    """differences: why the weights are not the same, naming the table's row.

    to_torch: None where no table pairs the parameters. notes: what is not compared therefore.
    paired: dotted paths of the port's Variables that the table pairs, beside its parameters.
    """

    differences: tuple[str, ...] = ()
    to_torch: ToTorch | None = None
    notes: tuple[str, ...] = ()
    paired: frozenset[str] = frozenset()


def compare_weights(
    reference: torch.nn.Module, port: nnx.Module, layout: Layout | None
) -> WeightComparison:
    """Every weight that is not the same on both sides, through `layout`."""
    if layout is None:
        note = "weights and parameter gradients were not compared: no layout"
        return WeightComparison(notes=(note,))
    note = "parameter gradients were not compared: the table does not pair them"
    arrays = {path: np.asarray(a) for path, a in carried(port, layout).items()}
    paired = frozenset(arrays.keys() - flatten(port).keys())
    try:
        ported = layout.to_torch(arrays)
    except TransferError as error:
        # A table that does not fit is a failure already; there is nothing to pair gradients by.
        return WeightComparison(tuple(f"weights: {p}" for p in error.problems), notes=(note,))
    differences = tuple(f"weights: {text}" for text in _differences(reference, ported, layout))
    buffers = dict(reference.named_buffers()).keys()
    if ported.keys() - buffers == dict(reference.named_parameters()).keys():
        return WeightComparison(differences, layout.to_torch, paired=paired)
    return WeightComparison(differences, notes=(note,))


def _differences(reference: torch.nn.Module, ported: Arrays, layout: Layout) -> Iterator[str]:
    """ported: the port's weights under torch's names."""
    weights = {name: as_numpy(tensor) for name, tensor in reference.state_dict().items()}
    own = dict(reference.named_parameters())
    untied = own.keys() | dict(reference.named_buffers()).keys()
    for name in own:
        if name not in ported:
            yield f"the reference's parameter {name!r} is not in the table"
    for name in ported:
        if name in weights and name not in untied:
            yield f"the reference ties {name!r} to another parameter, the table does not"
    for name, got in ported.items():
        if name not in weights:
            yield f"the table gives {name!r}, which the reference lacks"
            continue
        want = weights[name]
        if (got.dtype, got.shape) != (want.dtype, want.shape):
            yield (
                f"{name!r} is {want.dtype}{list(want.shape)} in the reference, "
                f"{got.dtype}{list(got.shape)} in the port"
            )
        elif got.tobytes() != want.tobytes():
            differ = int((got != want).sum())
            yield (
                f"{name!r} differs in {differ} of {got.size} elements; its row is "
                f"{layout.row_of(name)}"
            )
