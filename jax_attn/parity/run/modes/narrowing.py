"""Record casts of floating-point numbers to a coarser dtype, as torch.autocast makes them."""

from typing import Any

import torch
from torch._ops import OpOverload

from jax_attn.parity.run.modes.constants import Kwargs
from jax_attn.parity.run.modes.lines import calling_line
from jax_attn.parity.run.modes.mode import Mode


class Narrowing(Mode):
    """Recorder of casts of floating-point numbers to a coarser dtype than the one under test."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self._eps = torch.finfo(dtype).eps
        self.casts: dict[str, None] = {}

    def dispatched(self, func: OpOverload, args: tuple, kwargs: Kwargs) -> Any:
        to = kwargs.get("dtype")
        is_cast = func.overloadpacket.__name__ == "_to_copy" and args[0].is_floating_point()
        if is_cast and to and to.is_floating_point and torch.finfo(to).eps > self._eps:
            self.casts[f"to {str(to).removeprefix('torch.')} at {calling_line()}"] = None
        return func(*args, **kwargs)
