"""Broadcasting between arrays of several ranks, whatever JAX's debugging flag says.

`jax_numpy_rank_promotion` finds what programs broadcast by accident. Here it is meant: a bias
(N, H) is added to the heads of every token, a mask (T, S) holds for every row.
"""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax

P = ParamSpec("P")
R = TypeVar("R")


def broadcasting(fn: Callable[P, R]) -> Callable[P, R]:
    """Return the function, which runs, or is traced, with NumPy's rule for ranks."""

    @functools.wraps(fn)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        rule = jax.config.jax_numpy_rank_promotion  # type: ignore[attr-defined]  # made dynamically
        if rule == "allow":  # setting even the same rule would compile anew
            return fn(*args, **kwargs)
        with jax.numpy_rank_promotion("allow"):
            return fn(*args, **kwargs)

    return run
