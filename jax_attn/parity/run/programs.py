"""Programs of ports, each compiled once in a process.

A port of the same structure with other weights traces to the same program, and so does the second
run of a port that fails.
"""

import contextlib
import hashlib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex

from jax_attn.parity.run.inputs_and_runs import is_float

_KEPT = 8
"""The number of programs to keep; the least recently used are dropped."""
_PROGRAMS: OrderedDict[Any, jax.stages.Compiled] = OrderedDict()
_UNTOLD = ("callback", "sharding", "sdy.mesh")
"""Words in a program's text for what it does not specify: Python functions, and the devices."""


def call_compiled(wrapped: jax.stages.Wrapped, *args: Any) -> Any:
    """Call a jitted function; compile it only if its program is not kept in this process."""
    return LoweredProgram(wrapped.lower(*args)).compiled()(*args)


@dataclass(frozen=True)
class LoweredProgram:
    """A program that is traced and lowered."""

    lowered: jax.stages.Lowered

    @cached_property
    def key(self) -> Any:
        """A key of all that the program depends on; None if its text does not specify all of it."""
        text = self.lowered.as_text()
        constants: Any = getattr(self.lowered._lowering, "const_args", None)
        if constants or any(word in text for word in _UNTOLD):
            return None
        digest = hashlib.sha256(text.encode()).digest()
        device = jax.config.jax_default_device  # type: ignore[attr-defined]
        return digest, self.lowered.in_tree, self.lowered.out_tree, device

    @property
    def is_known(self) -> bool:
        """True if the program was compiled before and is still kept."""
        return self.key in _PROGRAMS

    def compiled(self) -> jax.stages.Compiled:
        """Return the compiled program, compiling it unless it is kept from before."""
        if self.key is None:
            return self.lowered.compile()
        if (program := _PROGRAMS.get(self.key)) is None:
            program = _PROGRAMS[self.key] = self.lowered.compile()
        with contextlib.suppress(KeyError):  # another check's thread may have dropped it
            _PROGRAMS.move_to_end(self.key)
            while len(_PROGRAMS) > _KEPT:
                _PROGRAMS.popitem(last=False)
        return program


def float_dtypes(jaxpr: jex.Jaxpr) -> Iterator[str]:
    """Yield the dtype of each floating-point result of the innermost operations."""
    for equation in jaxpr.eqns:
        if inside := list(jex.jaxprs_in_params(equation.params)):
            for each in inside:
                yield from float_dtypes(each)
        else:
            dtypes = (getattr(v.aval, "dtype", None) for v in equation.outvars)
            yield from (d.name for d in dtypes if isinstance(d, np.dtype) and is_float(d))
