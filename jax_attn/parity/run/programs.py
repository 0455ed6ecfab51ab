"""Programs of ports, each compiled once in a process.

A check of another port of the same structure, of other weights, say, or a second run of one that
fails, traces to the same program.
"""

import contextlib
import hashlib
from collections import OrderedDict
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax

_KEPT = 8
"""How many programs are kept, those that were used last."""
_PROGRAMS: OrderedDict[Any, jax.stages.Compiled] = OrderedDict()
_UNTOLD = ("callback", "sharding", "sdy.mesh")
"""What a program's text names and does not tell: functions of Python, and which devices."""


def call_compiled(wrapped: jax.stages.Wrapped, *args: Any) -> Any:
    """Call a jitted function, compiled only if its program has not been in this process."""
    return Traced(wrapped.lower(*args)).compiled()(*args)


@dataclass(frozen=True)
class Traced:
    """A program that is traced and lowered."""

    lowered: jax.stages.Lowered

    @cached_property
    def key(self) -> Any:
        """What the program depends on; None where its text does not tell all of it."""
        text = self.lowered.as_text()
        constants: Any = getattr(self.lowered._lowering, "const_args", None)
        if constants or any(word in text for word in _UNTOLD):
            return None
        digest = hashlib.sha256(text.encode()).digest()
        device = jax.config.jax_default_device  # type: ignore[attr-defined]
        return digest, self.lowered.in_tree, self.lowered.out_tree, device

    @property
    def is_known(self) -> bool:
        """Whether the program was compiled before."""
        return self.key in _PROGRAMS

    def compiled(self) -> jax.stages.Compiled:
        """Compile the program, or return what it was compiled to before."""
        if self.key is None:
            return self.lowered.compile()
        if (program := _PROGRAMS.get(self.key)) is None:
            program = _PROGRAMS[self.key] = self.lowered.compile()
        with contextlib.suppress(KeyError):  # another check's thread may have dropped it
            _PROGRAMS.move_to_end(self.key)
            while len(_PROGRAMS) > _KEPT:
                _PROGRAMS.popitem(last=False)
        return program
