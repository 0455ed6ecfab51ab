"""The arrays that every implementation is given, and the queries by which it is judged."""

import zlib
from collections.abc import Mapping
from typing import Any

import ml_dtypes  # noqa: F401  registers bfloat16 with NumPy
import numpy as np

from jax_attn.bench.workload import Workload

SEED = 0


def input_names(workload: Workload) -> tuple[str, ...]:
    """The names of what is attended with: the rest of the arrays are weights."""
    return ("x",) if workload.layer else ("query", "key", "value")


def weights(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `arrays` that are weights."""
    return {name: a for name, a in arrays.items() if name.endswith((".weight", ".bias"))}


def seeded_arrays(workload: Workload, seed: int = SEED) -> dict[str, np.ndarray]:
    """Inputs, weights and "cotangent" by name, in the workload's dtype: the same for everyone.

    Inputs and the cotangent are standard normal; weights, under the torch names of the `gqa`
    design, normal with the spread of torch.nn.Linear's initial ones. With a cache, "key" and
    "value" are those of the T tokens, "past_key" and "past_value" of those before them, and there
    is no cotangent.
    """
    w = workload
    rng = np.random.default_rng([seed, zlib.crc32(w.name.encode())])

    def normal(*shape: int, spread: float = 1.0) -> np.ndarray:
        drawn = rng.standard_normal(shape, np.float32)
        return (np.float32(spread) * drawn).astype(w.dtype)

    if w.room:
        new, past = (w.B, w.T, w.K, w.H), (w.B, w.filled, w.K, w.H)
        shapes = {"query": (w.B, w.T, w.N, w.H), "key": new, "value": new}
        shapes |= {"past_key": past, "past_value": past}
        return {name: normal(*shape) for name, shape in shapes.items()}
    if not w.layer:
        return {
            "query": normal(w.B, w.T, w.N, w.H),
            "key": normal(w.B, w.S, w.K, w.H),
            "value": normal(w.B, w.S, w.K, w.H),
            "cotangent": normal(w.B, w.T, w.N, w.H),
        }
    made = {"x": normal(w.B, w.T, w.D), "cotangent": normal(w.B, w.T, w.D)}
    heads, groups = w.N * w.H, w.K * w.H
    sizes = {"q": (heads, w.D), "k": (groups, w.D), "v": (groups, w.D), "out": (w.D, heads)}
    for part, (rows, columns) in sizes.items():
        spread = (3 * columns) ** -0.5
        made[f"{part}_proj.weight"] = normal(rows, columns, spread=spread)
        made[f"{part}_proj.bias"] = normal(rows, spread=spread)
    return made


def sampled_rows(workload: Workload) -> np.ndarray:
    """The queries by which a workload is judged, sorted: all of them where that costs little.

    The reference is run many times over in float64 with every operation perturbed, and its
    cost is that of the scores of these rows: at most four million of them, but 16 rows at
    least, the first and the last always there.
    """
    most = max(4_000_000 // (workload.B * workload.N * workload.S), 16)
    most = min(most, 128, workload.T)
    if most == workload.T:
        return np.arange(workload.T)
    inner = np.random.default_rng(SEED).choice(workload.T - 2, most - 2, replace=False) + 1
    return np.sort(np.concatenate([[0, workload.T - 1], inner]))


def sampled_cotangent(workload: Workload, cotangent: np.ndarray) -> np.ndarray:
    """The cotangent on the sampled rows alone: every gradient then depends on no other row."""
    kept = np.zeros_like(cotangent)
    rows = sampled_rows(workload)
    kept[:, rows] = cotangent[:, rows]
    return kept
