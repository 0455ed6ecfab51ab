"""The base class of all torch modes here."""

from collections.abc import Mapping
from typing import Any

from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

Kwargs = Mapping[str, Any]


class Mode(TorchDispatchMode):
    """A dispatch mode that does not disable torch's compiler, because nothing is compiled in it.

    Disabling it would import the compiler (.8 s) and take an operator's time at each call.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple = (), kwargs: Kwargs | None = None
    ) -> Any:
        return self.dispatched(func, args, kwargs or {})

    def dispatched(self, func: OpOverload, args: tuple, kwargs: Kwargs) -> Any:
        """Return the result of an operator under this mode."""
        return func(*args, **kwargs)
