"""List what torch has and JAX has not; a translated file contains the source of what it uses.

Each function or class uses `jax`, `jnp`, `nnx` and others of this table, nothing else.
"""

from collections.abc import Callable
from typing import Any

from jax_attn.translate.rules.functions import (
    arithmetic,
    fourier,
    indexing,
    losses,
    pools,
    recurrent,
    resizing,
    state,
)

_FILES = (arithmetic, fourier, indexing, losses, pools, recurrent, resizing, state)

FUNCTIONS: dict[str, Callable[..., Any]] = {
    name: function
    for file in _FILES
    for name, function in vars(file).items()
    if callable(function) and getattr(function, "__module__", None) == file.__name__
}

TAKEN = {"self", "jax", "jnp", "nnx", "math", "Array", *FUNCTIONS}
"""Names that mean something else in the file."""
