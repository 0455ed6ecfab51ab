"""What a traced function does, equation by equation."""

from collections.abc import Iterator

import jax


def equations(jaxpr) -> Iterator:
    """Every equation, those inside loops and calls too."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(equation.params, is_leaf=_is_jaxpr):
            if _is_jaxpr(inner):
                yield from equations(getattr(inner, "jaxpr", inner))


def shapes(jaxpr) -> set[tuple]:
    """The shape of every array that it makes."""
    return {variable.aval.shape for found in equations(jaxpr) for variable in found.outvars}


def _is_jaxpr(x) -> bool:
    return hasattr(x, "eqns") or hasattr(x, "jaxpr")
