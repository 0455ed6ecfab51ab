"""Functions that torch has and JAX has not; a translated file contains the source of those it uses.

Each stands alone: it uses `jax`, `jnp` and other functions of this table, nothing else.
"""

import inspect
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
)

FUNCTIONS: dict[str, Callable[..., Any]] = {
    name: function
    for module in (arithmetic, fourier, indexing, losses, pools, recurrent, resizing)
    for name, function in vars(module).items()
    if inspect.isfunction(function) and function.__module__ == module.__name__
}
