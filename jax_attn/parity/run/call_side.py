"""Call either side, and name the side and its inputs where it raises."""

from collections.abc import Callable
from typing import Any

from jax_attn.attention.checks import ArgumentError
from jax_attn.parity.run.inputs_and_runs import Inputs


class RaisedError(ValueError):
    """What a side raised on its inputs; the error itself is the cause."""


def call_side(
    side: str, inputs: Inputs, call: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """What `call` gives, of a side on these inputs.

    Raises RaisedError, which names the side and the inputs, for what it raises; this package's own
    errors, which name the argument, as they are.
    """
    try:
        return call(*args, **kwargs)
    except (ArgumentError, MemoryError):
        raise
    except Exception as error:
        arrays = inputs.named(inputs.args, inputs.kwargs)
        shapes = [f"{name} {a.dtype.name}{list(a.shape)}" for name, a in arrays.items()]
        given = f"inputs {', '.join(shapes)}" if shapes else "no inputs"
        raised = as_raised(error)
        raise RaisedError(f"{side}: expected it to run on {given}, got {raised}") from error


def as_raised(error: Exception) -> str:
    """An error's type and message; of a RaisedError those of its cause."""
    cause = error.__cause__ if isinstance(error, RaisedError) else error
    return f"{type(cause).__name__}: {cause}"
