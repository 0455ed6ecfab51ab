"""Check a port and, where it does not pass, find where it first differs and why."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from flax import nnx

from jax_attn.parity.checking.check import check
from jax_attn.parity.explaining.explanation import Explanation


def explain(
    reference: torch.nn.Module,
    port: nnx.Module,
    inputs: tuple[np.ndarray, ...] | Mapping[str, np.ndarray],
    **options: Any,
) -> Explanation:
    """Find where `port` first computes another number than `reference`, and what would explain it.

    The port is checked. If it does not pass, every floating-point tensor that the reference
    computes in float64 is compared with every one that the port computes, equation by equation.
    Tensors are paired by their numbers: no name is asked for, and axes may be permuted, merged or
    split. A wrong region lies between the last tensors that agree and the first that does not. Each
    is tried: if the port is given the reference's numbers there, what follows is right. Then the
    next region is looked for. The backward pass is searched where every output is right.

    Then the reference is run with each thing that ports often do in the region's place: another
    epsilon, activation, mask, scale, order of heads and so on. A cause is confirmed where the
    reference then computes the port's own numbers, within rounding.

    Args:
      reference, port, inputs: as for `check`.
      **options: the other arguments of `check`.

    Returns:
      The `Explanation`. It prints as a report; its `sentence` is the finding in short.

    Raises:
      TypeError, ValueError: as `check` raises them. ValueError also if the reference takes other
        operations from run to run, or if its tensors do not fit into half of the free memory.
    """
    return check(reference, port, inputs, **options).explain()
