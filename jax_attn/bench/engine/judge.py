"""Judge whether an implementation computes the right numbers, by the verdict of `parity`.

Sampled queries (`arrays.sampled_rows`) of sampled rows of the batch are compared with float64,
within budgets derived from roundoff (`jax_attn.parity.judge.budget`); no tolerance is typed in. The
cotangent is zero except there, so every gradient depends only on them, and the reference computes
no others.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

import torch_ref
from jax_attn.bench.arrays import (
    input_names,
    sampled_batch,
    sampled_rows,
    seeded_arrays,
    weights,
)
from jax_attn.bench.workload import BACKWARD, Workload
from jax_attn.parity.judge.budget import RUNS
from jax_attn.parity.judge.compare import TensorReport, Verdict, judge
from jax_attn.parity.run.inputs_and_runs import Inputs, wide
from jax_attn.parity.run.reference import Reference

Tensors = Mapping[str, Mapping[str, np.ndarray]]

# A perturbed run costs as much as the reference. For many scores fewer runs are drawn, and the
# Student quantile, which depends on their number, widens the budget accordingly.
_FEW_RUNS, _MANY_SCORES = 4, 1_000_000


class Judge:
    """The reference of one workload at a time, which judges others; runs in its own process."""

    def prepare(self, workload: Workload, seed: int, modes: Sequence[str]) -> None:
        """Run the reference in float64, unperturbed and perturbed."""
        arrays, batch = seeded_arrays(workload, seed), sampled_batch(workload)
        of_weights = weights(arrays)
        arrays = {k: a if k in of_weights else a[batch] for k, a in arrays.items()}
        rows = sampled_rows(workload)
        reference = _reference(workload, arrays, rows)
        cotangents = {"output": arrays["cotangent"][:, rows]} if BACKWARD in modes else {}
        scores = len(batch) * workload.N * len(rows) * workload.S
        runs = _FEW_RUNS if scores > _MANY_SCORES else RUNS
        self.exact = reference.exact(wide(cotangents)).kinds
        self.budgets = reference.spread(workload.dtype, cotangents, runs)
        self.own: dict[str, Tensors] = {}

    def take_own(self, mode: str, tensors: Tensors) -> None:
        """Keep the tensors of torch's fused attention; other errors are compared with its error."""
        self.own[mode] = {kind: wide(named) for kind, named in tensors.items()}

    def judge(self, mode: str, tensors: Tensors) -> dict[str, Any]:
        """Judge an implementation's tensors; return fields of its measurement."""
        reports = [
            report for kind, named in tensors.items() for report in self._kind(mode, kind, named)
        ]
        reasons = (f"{r.label}: {why}" for r in reports for why in r.reasons)
        return fields(Verdict.worst(r.verdict for r in reports), reasons, reports)

    def _kind(self, mode: str, kind: str, named: Mapping[str, np.ndarray]) -> list[TensorReport]:
        exact, budgets = self.exact[kind], self.budgets[kind]
        if named.keys() != exact.keys():
            raise ValueError(f"{kind}: expected {sorted(exact)}, got {sorted(named)}")
        own = self.own.get(mode, {}).get(kind, {})
        labels = {"kind": kind, "transform": mode}
        return [
            judge(exact[name], tensor, own.get(name), budgets[name], name=name, **labels)
            for name, tensor in wide(named).items()
        ]


def fields(
    verdict: Verdict, reasons: Iterable[str], reports: Sequence[TensorReport]
) -> dict[str, Any]:
    """Return a verdict as fields of a measurement."""
    return {"verdict": str(verdict), "reason": "; ".join(reasons), **errors(reports)}


def errors(reports: Sequence[TensorReport]) -> dict[str, Any]:
    """Return the worst tensor and both its errors over its scale, as fields of a measurement.

    A tensor that is zero in theory has no scale and is left out; if all are, the result is empty.
    """
    if not (scaled := [report for report in reports if not report.is_zero]):
        return {}
    report = worst(scaled)
    own = report.reference_error
    return {
        "tensor": report.label,
        "error": report.error / report.scale,
        "reference_error": None if own is None else own / report.scale,
    }


def worst(reports: Sequence[TensorReport]) -> TensorReport:
    """Return the report with the largest multiple of torch's error, else of its own scale.

    If only errors counted, a tensor on which torch errs as much would hide a worse multiple
    elsewhere.
    """
    if any(report.ratio is not None for report in reports):
        return max(reports, key=lambda report: -1.0 if report.ratio is None else report.ratio)
    return max(reports, key=lambda report: report.error / report.scale)


def _reference(workload: Workload, arrays: Mapping[str, np.ndarray], rows: np.ndarray) -> Reference:
    """Build the attention of the sampled queries from its definition, in torch."""
    w = workload
    index = torch.from_numpy(rows)
    visible = torch.arange(w.S) <= index[:, None] + w.filled if w.is_causal else None

    if not w.layer:

        def core(module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return _attention(query.index_select(1, index), key, value, visible)

        inputs = {name: arrays[name] for name in input_names(w)}
        for name in ("key", "value") if w.room else ():
            inputs[name] = np.concatenate([arrays[f"past_{name}"], arrays[name]], axis=1)
        return Reference(torch.nn.Module(), core, Inputs((), inputs))

    def layer(module: torch.nn.Module, x: Tensor) -> Tensor:
        return module(x.index_select(1, index), x, x, visible)

    module = torch_ref.DESIGNS["gqa"](w.D, w.N, w.K, head_dim=w.H).eval()
    module.load_state_dict(
        {k: torch.from_numpy(a.astype(np.float32)) for k, a in weights(arrays).items()}
    )
    return Reference(module, layer, Inputs((), {"x": arrays["x"]}))


def _attention(query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None) -> Tensor:
    """Compute softmax(QKᵀ/√H)V for R queries.

    query: (B, R, N, H). key, value: (B, S, K, H), heads shared by groups. visible: (R, S) or None.
    """
    q_BRKGH = query.unflatten(2, (key.shape[2], -1))
    scores_BKGRS = torch.einsum("brkgh,bskh->bkgrs", q_BRKGH, key) / query.shape[-1] ** 0.5
    if visible is not None:
        scores_BKGRS = scores_BKGRS.masked_fill(~visible, float("-inf"))
    heads = torch.einsum("bkgrs,bskh->brkgh", torch.softmax(scores_BKGRS, -1), value)
    return heads.flatten(2, 3)
