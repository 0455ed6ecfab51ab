"""The verifiers that are scored: a function of the numbers of a pair, each at its own threshold.

To score another one, add a row to `VERIFIERS`.
"""

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

Tensors = Mapping[str, np.ndarray]
Verifier = Callable[[Tensors, Tensors, Tensors], bool]
"""(the port's tensors, the reference's in the same dtype, the reference's in float64) -> passed"""


def _all_close(rtol: float, atol: float, got: Tensors, want: Tensors, exact: Tensors) -> bool:
    return all(np.allclose(got[k], want[k], rtol=rtol, atol=atol) for k in want)


def _largest(most: float, got: Tensors, want: Tensors, exact: Tensors) -> bool:
    return all(bool(np.abs(got[k] - want[k]).max(initial=0) <= most) for k in want)


def _cosine(least: float, got: Tensors, want: Tensors, exact: Tensors) -> bool:
    def alike(a: np.ndarray, b: np.ndarray) -> bool:
        a, b = np.float64(a).ravel(), np.float64(b).ravel()
        lengths = np.linalg.norm(a) * np.linalg.norm(b)
        return bool(lengths > 0 and a @ b / lengths >= least)

    return all(alike(got[k], want[k]) for k in want)


def _log_softmax(a: np.ndarray) -> np.ndarray:
    a = np.float64(a) - np.float64(a).max(-1, keepdims=True)
    return a - np.log(np.exp(a).sum(-1, keepdims=True))


def _divergence(most: float, got: Tensors, want: Tensors, exact: Tensors) -> bool:
    """The mean of KL(reference ‖ port) over the last axis, of logits."""

    def of(a: np.ndarray, b: np.ndarray) -> float:
        p, q = _log_softmax(b), _log_softmax(a)
        return float((np.exp(p) * (p - q)).sum(-1).mean())

    return all(of(got[k], want[k]) <= most for k in want if want[k].ndim)


def _top_1(got: Tensors, want: Tensors, exact: Tensors) -> bool:
    return all(np.array_equal(got[k].argmax(-1), want[k].argmax(-1)) for k in want if want[k].ndim)


def _ratio(most: float, got: Tensors, want: Tensors, exact: Tensors) -> bool:
    """The port's error over the reference's own, both against the reference in a finer dtype."""

    def error(a: np.ndarray, b: np.ndarray) -> float:
        return float(np.linalg.norm(np.float64(a) - b))

    return all(error(got[k], exact[k]) <= most * error(want[k], exact[k]) for k in want)


LEAST = 3e-6
"""Of the largest number of a tensor: what float64 must see of a mistake. Right ports differ by up
to two fifths of it, since parts of both sides compute in float32 whatever their inputs are."""
OURS = "jax-attn"
ENDS = {False: ", outputs", True: ", gradients"}
"""Whether gradients are compared -> the end of a verifier's name in the records."""
OF_LOGITS = ("KL .01", "KL .1", "top-1 agrees")
"""The verifiers that read logits, and are not asked about other outputs."""
# name -> the verifier, whether it takes gradients as well, and what the threshold is
VERIFIERS: dict[str, tuple[Verifier, bool, str]] = {
    "allclose 1e-5": (partial(_all_close, 1e-5, 1e-5), True, "relative and absolute, both 1e-5"),
    "allclose 1e-3": (partial(_all_close, 1e-3, 1e-3), True, "relative and absolute, both 1e-3"),
    "allclose 1e-2": (partial(_all_close, 1e-2, 1e-2), True, "relative and absolute, both 1e-2"),
    "absolute 1e-4": (
        partial(_all_close, 1e-7, 1e-4),
        True,
        "`assert_allclose` with an absolute 1e-4, as in conversion scripts of KerasHub",
    ),
    "absolute 1e-3": (
        partial(_all_close, 1e-7, 1e-3),
        True,
        "the same with 1e-3, as in others of these scripts",
    ),
    "largest 1e-5": (
        partial(_largest, 1e-5),
        True,
        "the largest difference, as in the shared test of transformers' Flax models",
    ),
    "largest 4e-2": (
        partial(_largest, 4e-2),
        True,
        "the same, as in the tests of some of transformers' Flax models",
    ),
    "cosine .999": (partial(_cosine, 0.999), True, "of each tensor, flattened"),
    "cosine .99": (partial(_cosine, 0.99), True, "of each tensor, flattened"),
    "KL .01": (partial(_divergence, 0.01), False, "the mean over positions, of logits alone"),
    "KL .1": (partial(_divergence, 0.1), False, "the mean over positions, of logits alone"),
    "top-1 agrees": (_top_1, False, "the same largest logit at every position"),
    "error ratio 1.2": (
        partial(_ratio, 1.2),
        False,
        "the port's error over the reference's own, both against float64: after AWS Neuron's R, "
        "which has float32 in place of float64",
    ),
}
