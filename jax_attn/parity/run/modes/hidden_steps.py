"""The number of roundings of a kernel whose steps are unknown."""

import math
from collections.abc import Sequence

import torch
from torch._ops import OpOverload

from jax_attn.parity.run.modes.constants import Kwargs, tensors_of

_POSITION = 3
"""The number of roundings of a position at which an interpolation reads."""


def hidden_steps(func: OpOverload, args: tuple, kwargs: Kwargs) -> int:
    """Return how many roundings of an input make the kernel's result exact for it.

    A factorization or transform of m by n numbers changes each up to m * n times; as a random walk,
    that errs by sqrt(m * n) roundoffs (Higham and Mary, "A New Approach to Probabilistic Rounding
    Error Analysis", 2019). An interpolation multiplies each by a weight, which errs like a position
    of up to sqrt(m * n). An operator that torch composes of others, which the mode does not see,
    counts as one roundoff.
    """
    if func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
        return 1
    sizes: list[Sequence[int]] = [x.shape for x in tensors_of((args, kwargs))]
    sizes += [x for x in args if isinstance(x, list) and all(type(n) is int for n in x)]
    steps = max([math.prod(size[-2:]) for size in sizes], default=1)
    return steps * (_POSITION**2 if "upsample" in func.overloadpacket.__name__ else 1)
