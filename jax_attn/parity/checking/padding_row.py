"""The row `padding_idx` of a torch Embedding, for which torch computes no gradient."""

from collections.abc import Callable, Mapping

import numpy as np
import torch

from jax_attn.parity.judge.compare import TensorReport, Verdict
from jax_attn.parity.judge.finding import StandingNote


def padding_rows(reference: torch.nn.Module) -> dict[str, int]:
    """Return the padding row of every embedding that has one, by parameter name."""
    names = {id(p): name for name, p in reference.named_parameters()}
    return {
        names[id(module.weight)]: module.padding_idx
        for module in reference.modules()
        if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag)
        and module.padding_idx is not None
        and id(module.weight) in names
    }


def without_padding_row(
    report: TensorReport,
    rows: Mapping[str, int],
    got: np.ndarray,
    want: np.ndarray,
    judge: Callable[[np.ndarray], TensorReport],
) -> tuple[TensorReport, tuple[StandingNote, ...]]:
    """Return the report on a gradient, without the padding row and with a note if only it fails.

    got, want: the port's gradient and the oracle's. judge: makes the report of another gradient.
    """
    row = rows.get(report.name)
    if row is None or report.verdict is not Verdict.FAIL or got.shape != want.shape:
        return report, ()
    without = got.copy()
    without[row] = want[row]
    if (other := judge(without)).verdict is Verdict.FAIL:
        return report, ()
    note = StandingNote(
        "padding-row",
        f"row {row} of grad {report.name}, its padding_idx, was not compared: torch computes no "
        "gradient for that row, but the port does, and an optimizer would move it; set this "
        "gradient to zero before an update",
    )
    return other, (note,)
