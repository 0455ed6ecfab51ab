"""Several ports judged against one reference, whose own side is prepared once."""

from typing import Any

import pytest

import jax_attn.parity.checking.check as checking

_prepare, _try_canaries = checking.Prepared, checking.try_canaries


class Once:
    """Gives again what was made of the same module, call, inputs and options."""

    def __init__(self) -> None:
        self._prepared: dict[Any, Any] = {}
        self._canaries: dict[int, Any] = {}

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make checks of one reference on the same inputs prepare it, and try canaries, once."""
        monkeypatch.setattr(checking, "Prepared", self._prepare)
        monkeypatch.setattr(checking, "try_canaries", self._try_canaries)

    def _prepare(self, reference: Any, dtype: str, *, watch: Any, **options: Any) -> Any:
        inputs = reference.inputs.named(reference.inputs.args, reference.inputs.kwargs)
        given = tuple((k, a.dtype.name, a.shape, a.tobytes()) for k, a in inputs.items())
        # The key holds the module itself, so that its id is not given to another.
        key = (reference.module, reference.call, reference.parameters, dtype, given)
        key += tuple(options.items())
        if key not in self._prepared:
            self._prepared[key] = _prepare(reference, dtype, watch=watch, **options)
        return self._prepared[key]

    def _try_canaries(self, prepared: Any) -> Any:
        """`prepared` is kept as well: another one may not have its id."""
        if id(prepared) not in self._canaries:
            self._canaries[id(prepared)] = prepared, _try_canaries(prepared)
        return self._canaries[id(prepared)][1]
