"""How many roundings a kernel makes whose steps are not known."""

import math
from collections.abc import Sequence

import torch
from torch._ops import OpOverload

from jax_attn.parity.run.modes.constants import Kwargs, tensors_of

_POSITION = 3
"""Roundings of a position at which an interpolation reads."""


def hidden_steps(func: OpOverload, args: tuple, kwargs: Kwargs) -> int:
    """After how many roundings of an input the kernel's result is exact for it.

    In a factorization or a transform of m by n numbers each is changed up to m * n times: by a
    random walk it errs by sqrt(m * n) roundoffs (Higham and Mary, "A New Approach to Probabilistic
    Rounding Error Analysis", 2019). An interpolation multiplies each by a weight, which errs as a
    position of up to sqrt(m * n) does. What torch makes of other operators, which are not seen,
    errs by a roundoff.
    """
    if func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
        return 1
    sizes: list[Sequence[int]] = [x.shape for x in tensors_of((args, kwargs))]
    sizes += [x for x in args if isinstance(x, list) and all(type(n) is int for n in x)]
    steps = max([math.prod(size[-2:]) for size in sizes], default=1)
    return steps * (_POSITION**2 if "upsample" in func.overloadpacket.__name__ else 1)
