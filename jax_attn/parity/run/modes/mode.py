"""The base class of all torch modes here."""

from torch.utils._python_dispatch import TorchDispatchMode


class Mode(TorchDispatchMode):
    """A dispatch mode that does not disable torch's compiler, because nothing is compiled in it.

    Disabling it would import the compiler (.8 s) and take an operator's time at each call.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
