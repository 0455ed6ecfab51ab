"""Check a port and, if it does not pass, find where it first differs and why."""

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
    Tensors are paired only by their numbers, not by names; axes may be permuted, merged or split. A
    wrong region lies between the last tensors that agree and the first that does not. Each region
    is verified: if the port receives the reference's numbers there, all that follows is right. Then
    the next region is searched for. The backward pass is searched if every output is right.

    Then the reference is run with common mistakes of ports in the region: another epsilon,
    activation, mask, scale, order of heads and so on. A cause is confirmed if the reference then
    computes the port's own numbers, within rounding.

    Args:
      reference, port, inputs: as for `check`.
      **options: the other arguments of `check`.

    Returns:
      The `Explanation`. It prints as a report; its `sentence` summarizes the finding.

    Raises:
      TypeError, ValueError: as `check` raises them. ValueError also if the reference runs different
        operations from run to run, or if its tensors do not fit into half of the free memory.
    """
    return check(reference, port, inputs, **options).explain()
