"""Ask a port in this process what a port's process is asked, each question through messages."""

from collections.abc import Callable, Mapping
from typing import Any

from jax_attn.parity import Pair
from jax_attn.parity.frozen import port_process
from jax_attn.parity.frozen.messages import parsed, written
from jax_attn.parity.frozen.port_side import PortProcess


class AskedHere(PortProcess):
    """The answers of a pair's port; `altered`: question -> what becomes of its answer."""

    def __init__(self, pair: Pair, altered: Mapping[str, Callable[[Any], Any]] | None = None):
        super().__init__("port.py:make", 60.0)
        self._altered = altered or {}
        self._port = port_process.Answering(self._ends)
        self._port.read = lambda named, dtype: pair

    def __enter__(self) -> "AskedHere":
        return self

    def ask(self, question: str, *args: Any) -> Any:
        name, args = parsed(*written((question, args)))
        answer = getattr(self._port, name)(*args)
        answer = self._altered.get(question, lambda same: same)(answer)
        return parsed(*written(answer))

    def leave(self) -> None:
        pass
