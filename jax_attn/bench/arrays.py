"""The arrays that every implementation receives, and the queries on which it is judged."""

import zlib
from collections.abc import Mapping
from typing import Any

import ml_dtypes  # noqa: F401  registers bfloat16 with NumPy
import numpy as np

from jax_attn.bench.workload import Workload

SEED = 0


def input_names(workload: Workload) -> tuple[str, ...]:
    """Return the names of the call's inputs among the arrays."""
    return ("x",) if workload.layer else ("query", "key", "value")


def weights(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return the weights and biases among `arrays`."""
    return {name: a for name, a in arrays.items() if name.endswith((".weight", ".bias"))}


def seeded_arrays(workload: Workload, seed: int = SEED) -> dict[str, np.ndarray]:
    """Draw inputs, weights and "cotangent", and return them by name, in the workload's dtype.

    Inputs and the cotangent are standard normal. Weights have the torch names of the `gqa` design
    and are normal with the spread of torch.nn.Linear's initial weights. With a cache, "key" and
    "value" belong to the T new tokens, "past_key" and "past_value" to those before, and there is
    no cotangent.
    """
    w = workload
    rng = np.random.default_rng([seed, zlib.crc32(w.name.encode())])

    def normal(*shape: int, spread: float = 1.0) -> np.ndarray:
        return (np.float32(spread) * rng.standard_normal(shape, np.float32)).astype(w.dtype)

    if w.layer:
        drawn = {"x": normal(w.B, w.T, w.D), "cotangent": normal(w.B, w.T, w.D)}
        heads, groups = w.N * w.H, w.K * w.H
        sizes = {"q": (heads, w.D), "k": (groups, w.D), "v": (groups, w.D), "out": (w.D, heads)}
        for part, (rows, columns) in sizes.items():
            spread = (3 * columns) ** -0.5
            drawn[f"{part}_proj.weight"] = normal(rows, columns, spread=spread)
            drawn[f"{part}_proj.bias"] = normal(rows, spread=spread)
        return drawn
    query, past = (w.B, w.T, w.N, w.H), (w.B, w.filled, w.K, w.H)
    key = w.B, w.S - w.filled, w.K, w.H
    shapes = {"query": query, "key": key, "value": key}
    shapes |= {"past_key": past, "past_value": past} if w.room else {"cotangent": query}
    return {name: normal(*shape) for name, shape in shapes.items()}


def sampled_batch(workload: Workload) -> np.ndarray:
    """Choose the rows of the batch on which a workload is judged: all, if they are not large.

    The first and the last are always included; more, up to eight million elements of the keys.
    """
    most = max(8_000_000 // (workload.S * workload.K * workload.H), 2)
    return np.linspace(0, workload.B - 1, min(most, workload.B)).round().astype(int)


def sampled_rows(workload: Workload) -> np.ndarray:
    """Choose the queries on which a workload is judged, sorted: all of them if that costs little.

    The reference runs many times in float64 with every operation perturbed, and computes the scores
    of these rows. Their number is limited to 128 rows and to four million scores, but is at least
    16, unless there are fewer. The first and the last row are always included.
    """
    batch = len(sampled_batch(workload))
    most = max(4_000_000 // (batch * workload.N * workload.S), 16)
    most = min(most, 128, workload.T)
    if most == workload.T:
        return np.arange(workload.T)
    inner = np.random.default_rng(SEED).choice(workload.T - 2, most - 2, replace=False) + 1
    return np.sort(np.concatenate([[0, workload.T - 1], inner]))


def sampled_cotangent(workload: Workload, cotangent: np.ndarray) -> np.ndarray:
    """Return the cotangent, zero except on the sampled rows; gradients depend only on these."""
    kept = np.zeros_like(cotangent)
    judged = np.ix_(sampled_batch(workload), sampled_rows(workload))
    kept[judged] = cotangent[judged]
    return kept
