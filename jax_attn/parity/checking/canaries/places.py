"""Places of operators in a reference: the module that calls one, and its index among its kind."""

from collections import Counter
from threading import get_ident
from typing import Any, NamedTuple, Self

import torch
from torch._ops import OpOverload
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from jax_attn.parity.run.modes.constants import Kwargs
from jax_attn.parity.run.modes.float64_mode import Float64, not_in_place

# In-place forms of operators in which bugs are planted.
_IN_PLACE = frozenset(("pow_", "rsqrt_", "sqrt_", "tanh_"))


class Place(NamedTuple):
    """The n-th operator of its kind in a call of a module: the same place in each of its calls.

    module: None outside all modules, where each operator has its own place.
    """

    module: torch.nn.Module | None
    nth: int


class Placed(Float64):
    """Float64 that tracks the place of each operator.

    Places have names after a call of `name_modules`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[torch.nn.Module | None, Counter]] = [(None, Counter())]
        self._names: dict[torch.nn.Module, str] = {}

    def __enter__(self) -> Self:
        self._thread = get_ident()
        self._hooks = (
            register_module_forward_pre_hook(self._entered),
            register_module_forward_hook(self._left, always_call=True),
        )
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        for hook in self._hooks:
            hook.remove()
        super().__exit__(*raised)

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple = (), kwargs: Kwargs | None = None
    ) -> Any:
        if func.overloadpacket.__name__ in _IN_PLACE:
            return args[0].copy_(self.compute(not_in_place(func), args, dict(kwargs or {})))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def name_modules(self, root: torch.nn.Module) -> None:
        self._names = {module: name for name, module in root.named_modules()}

    def name(self, place: Place) -> str:
        """Return the path of the place's module in the reference; "" for the reference itself."""
        return self._names.get(place.module, "") if place.module else ""

    def place_met(self, kind: str) -> Place:
        """Return the place of the operator about to be computed. Call it once for each operator."""
        module, met = self._calls[-1]
        met[kind] += 1
        return Place(module, met[kind])

    def _entered(self, module: torch.nn.Module, _: Any) -> None:
        if get_ident() == self._thread:  # torch calls the hooks of every thread
            self._calls.append((module, Counter()))

    def _left(self, *_: Any) -> None:
        if get_ident() == self._thread:
            self._calls.pop()
