"""What every mode of torch here is."""

from torch.utils._python_dispatch import TorchDispatchMode


class Mode(TorchDispatchMode):
    """A dispatch mode that torch's compiler is not kept out of: nothing is compiled in it.

    To keep it out would import the compiler, .8 s, and then take an operator's time each time.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
