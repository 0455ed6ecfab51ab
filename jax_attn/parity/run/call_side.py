"""Call the reference or the port; if it raises an error, name the side and its inputs."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from jax_attn.attention.checks import ArgumentError
from jax_attn.parity.run.inputs_and_runs import Inputs, RaisedError


def call_side(
    side: str, inputs: Inputs, call: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """Return the result of `call`, which runs a side on these inputs.

    Raises RaisedError, which names the side and the inputs, for any error of the call, except that
    ArgumentError, which names the argument itself, and MemoryError pass through unchanged.
    """
    try:
        return call(*args, **kwargs)
    except (ArgumentError, MemoryError):
        raise
    except Exception as error:
        shapes = [f"{k} {a.dtype.name}{list(a.shape)}" for k, a in inputs.by_name.items()]
        given = f"inputs {', '.join(shapes)}" if shapes else "no inputs"
        raised = as_raised(error)
        raise RaisedError(f"{side}: expected it to run on {given}, got {raised}") from error


@contextlib.contextmanager
def raised_when(step: str) -> Iterator[None]:
    """Add to a RaisedError what was done with the side, since it may take other steps."""
    try:
        yield
    except RaisedError as error:
        raise RaisedError(f"{error}; {step}") from error.__cause__


def as_raised(error: Exception) -> str:
    """Return an error's type and message; for a RaisedError, those of its cause."""
    cause = error.__cause__ if isinstance(error, RaisedError) else error
    return f"{type(cause).__name__}: {cause}"
