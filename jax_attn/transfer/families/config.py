"""Reading a config.json: what is there, what it may be called, and all that is wrong with it."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from jax_attn.transfer.problems import Problem, TransferError

LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
DECODER_LAYERS = ("num_decoder_layers",)
"""How configs name the number of layers, and of those on a decoder's side where it has its own."""

_MISSING = object()


class StandIn(int):
    """A 1 in the place of a number that is wrong: of what follows from it nothing is said."""


class Reading:
    """A config as it is read: each value is one that has its place, or a problem.

    What is wrong goes into `problems`, and something in its place is given, so that the reader
    goes on and all that is wrong comes together. Where nobody gives a default, what is not there
    is wrong as well; null counts as not there. file: what the config is called.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        problems: dict[Problem, None] | None = None,
        file: str = "config.json",
    ):
        self.config = config
        self.problems = {} if problems is None else problems
        self.file = file

    def get(self, name: str, default: Any = None) -> Any:
        """The value as it stands there."""
        return self.config.get(name, default)

    def over(self, defaults: Mapping[str, Any]) -> "Reading":
        """The same with `defaults` for what is not there; null counts as there."""
        return Reading({**defaults, **self.config}, self.problems)

    def inside(self, name: str) -> "Reading":
        """The object that stands there; an empty one for none."""
        held = self.get(name) or {}
        if not isinstance(held, Mapping):
            self.refuse(name, held, "a JSON object")
            held = {}
        return Reading(held, self.problems)

    def number(self, *names: str, default: Any = _MISSING, least: int = 1) -> Any:
        """The whole number ≥ least that the first of `names` there gives."""

        def is_count(value: Any) -> bool:
            is_whole = isinstance(value, int) and not isinstance(value, bool)
            return is_whole and least <= value <= sys.maxsize  # JSON has longer ones

        return self._read(names, default, f"a whole number ≥ {least}", is_count, StandIn(1))

    def real(self, *names: str, default: Any = _MISSING) -> Any:
        """Likewise a finite number above 0."""
        return self._read(names, default, "a number above 0", _is_real, StandIn(1))

    def flag(self, *names: str, default: Any = _MISSING) -> Any:
        """Likewise true or false."""
        return self._read(names, default, "true or false", lambda v: isinstance(v, bool), False)

    def words(self, name: str, known: tuple[str, ...], count: int | None) -> list[str] | None:
        """Likewise a list of `known` words, `count` of them; None where there is none."""

        def are_known(value: Any) -> bool:
            return isinstance(value, list) and all(word in known for word in value)

        made = self._read((name,), None, f"a list of {', '.join(known)}", are_known, None)
        if None not in (made, count) and len(made) != count:
            self.refuse(name, made, f"{count} words, one a layer", count)
        return made

    def share(self, width: str, heads: str) -> tuple[int, int, int]:
        """(D, N, H) where N heads share a width D: each has H = D / N features of it."""
        D, N = self.number(width), self.number(heads)
        return D, N, self.divided((width, D), (heads, N))

    def kv_heads(self, name: str, heads: str) -> int:
        """K, how many key/value heads `name` gives; as many as there are query heads where it is
        not there."""
        N = self.number(heads)
        K = self.number(name, default=N)
        self.divided((heads, N), (name, K))
        return K

    def divided(self, whole: tuple[str, int], parts: tuple[str, int]) -> int:
        """One part of a whole, each a name and what it gives, which must come out even."""
        (name, value), (by, count) = whole, parts
        if isinstance(value, StandIn) or isinstance(count, StandIn):
            return StandIn(1)
        if value % count:
            self.refuse(by, count, f"a divisor of {name} = {value}")
            return StandIn(1)
        return value // count

    def refuse(self, name: str, value: Any, expected: str, *of: Any) -> None:
        """Note a value that has no place here; not where one `of` those it hangs on is wrong."""
        if not any(isinstance(other, StandIn) for other in of):
            text = f"expected {expected}, got {value!r}"
            self.problems[Problem("file", f"{self.file} {name}", text)] = None

    def _read(
        self,
        names: tuple[str, ...],
        default: Any,
        expected: str,
        fits: Callable[[Any], bool],
        instead: Any,
    ) -> Any:
        given = {name: value for name in names if (value := self.get(name)) is not None}
        wrong = {name: value for name, value in given.items() if not fits(value)}
        if not given and default is _MISSING:
            wrong = {" or ".join(names): None}
        for name, value in wrong.items():
            self.refuse(name, value, expected)
        return instead if wrong else next(iter(given.values()), default)


@contextmanager
def reading(config: Mapping[str, Any]) -> Iterator[Reading]:
    """A reading of which all that is wrong is raised at its end, in one TransferError."""
    read = Reading(config)
    yield read
    if read.problems:
        raise TransferError("reading the config", read.problems)


def _is_real(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 < value <= sys.float_info.max
