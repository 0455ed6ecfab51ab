"""Read a config.json: look up values under all their names, check them, and collect problems."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from jax_attn.transfer.problems import Problem, TransferError

Config = Mapping[str, Any]

# The names of these numbers in configs of all families.
NUM_HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads")
NUM_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "n_kv_heads")
HEAD_DIM = ("head_dim", "d_kv", "attention_head_size", "kv_channels")
EMBED_DIM = ("hidden_size", "n_embd", "n_embed", "d_model")
SIZES = (EMBED_DIM, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM)
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
DECODER_LAYERS = ("num_decoder_layers",)
FULL, SLIDES = "full_attention", "sliding_attention"
LAYER_KINDS = (FULL, SLIDES)
"""The words in layer_types for layers without a window and with one."""

_MISSING = object()


class StandIn(int):
    """Placeholder for an invalid number; suppresses follow-on errors."""


class Reading:
    """A config whose values are checked as they are read.

    An invalid value goes into `problems` and a placeholder is returned, so that one reading
    collects everything that is wrong. A missing value is invalid if it has no default; null counts
    as missing. file: the name of the config in messages. names: all names that were read.
    """

    def __init__(
        self,
        config: Config,
        problems: dict[Problem, None] | None = None,
        file: str = "config.json",
        names: set[str] | None = None,
    ):
        self.config = config
        self.problems = {} if problems is None else problems
        self.file = file
        self.names = set() if names is None else names

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value as it is, unchecked."""
        self.names.add(name)
        return self.config.get(name, default)

    def over(self, defaults: Mapping[str, Any]) -> "Reading":
        """Return the same config with `defaults` for missing keys; here null counts as present."""
        return self._of({**defaults, **self.config})

    def with_values(self, values: Mapping[str, Any]) -> "Reading":
        """Return the same config with these values."""
        return self._of({**self.config, **values})

    def inside(self, name: str) -> "Reading":
        """Return a reading of a nested object; of an empty one if it is missing."""
        nested = self.get(name) or {}
        if not isinstance(nested, Mapping):
            self.refuse(name, nested, "a JSON object")
            nested = {}
        return self._of(nested)

    def number(self, *names: str, default: Any = _MISSING, least: int = 1) -> Any:
        """Return the whole number ≥ least under one of `names`; several must agree."""

        def is_count(value: Any) -> bool:
            is_whole = isinstance(value, int) and not isinstance(value, bool)
            return is_whole and least <= value <= sys.maxsize  # JSON allows larger integers

        return self._read(names, default, f"a whole number ≥ {least}", is_count, StandIn(1))

    def real(self, *names: str, default: Any = _MISSING) -> Any:
        """Return the finite number above 0 under one of `names`, as `number` does."""
        return self._read(names, default, "a number above 0", is_positive, StandIn(1))

    def flag(self, *names: str, default: Any = _MISSING) -> Any:
        """Return the boolean under one of `names`, as `number` does."""
        return self._read(names, default, "true or false", lambda v: isinstance(v, bool), False)

    def words(self, name: str, known: tuple[str, ...], count: int | None) -> list[str] | None:
        """Return the list of `known` words under `name`, `count` of them; None if it is missing."""

        def are_known(value: Any) -> bool:
            return isinstance(value, list) and all(word in known for word in value)

        words = self._read((name,), None, f"a list of {', '.join(known)}", are_known, None)
        if None not in (words, count) and len(words) != count:
            self.refuse(name, words, f"{count} words, one for each layer", count)
        return words

    def share(self, width: str, heads: str) -> tuple[int, int, int]:
        """Return (D, N, H) of N heads that share a width D, so that H = D / N."""
        D, N = self.number(width), self.number(heads)
        return D, N, self.divided((width, D), (heads, N))

    def kv_heads(self, name: str, heads: str) -> int:
        """Return K, the number of key/value heads; if it is missing, N, that of query heads."""
        N = self.number(heads)
        K = self.number(name, default=N)
        self.divided((heads, N), (name, K))
        return K

    def divided(self, whole: tuple[str, int], parts: tuple[str, int]) -> int:
        """Return the size of one of several equal parts. Arguments are (name, value)."""
        (name, value), (by, count) = whole, parts
        if isinstance(value, StandIn) or isinstance(count, StandIn):
            return StandIn(1)
        if value % count:
            self.refuse(by, count, f"a divisor of {name} = {value}")
            return StandIn(1)
        return value // count

    def refuse(self, name: str, value: Any, expected: str, *of: Any) -> None:
        """Note an unsupported value, unless a value that it depends on (`of`) is invalid too."""
        if not any(isinstance(other, StandIn) for other in of):
            text = f"expected {expected}, got {value!r}"
            self.problems[Problem("file", f"{self.file} {name}", text)] = None

    def _of(self, config: Config) -> "Reading":
        return Reading(config, self.problems, self.file, self.names)

    def _read(
        self,
        names: tuple[str, ...],
        default: Any,
        expected: str,
        fits: Callable[[Any], bool],
        instead: Any,
    ) -> Any:
        present = {name: value for name in names if (value := self.get(name)) is not None}
        invalid = {name: value for name, value in present.items() if not fits(value)}
        if not present and default is _MISSING:
            invalid = {" or ".join(names): None}
        for name, value in invalid.items():
            self.refuse(name, value, expected)
        if invalid or not present:
            return instead if invalid else default
        (first, value), *others = present.items()
        differing = {name: other for name, other in others if other != value}
        for name, other in differing.items():
            self.refuse(name, other, f"the same as {first}, which is {value!r}")
        return instead if differing else value


@contextmanager
def reading(config: Config) -> Iterator[Reading]:
    """Yield a reading of the config; then raise one TransferError for all problems."""
    read = Reading(config)
    yield read
    if read.problems:
        raise TransferError("reading the config", read.problems)


def disagreements(options: Mapping[str, int | None], config: Sequence[int | None]) -> list[Problem]:
    """Report options, by name, whose values differ from the config's; None agrees with all."""
    return [
        Problem("ambiguous", option, f"expected {expected}, as config.json says, got {value}")
        for (option, value), expected in zip(options.items(), config, strict=True)
        if None not in (value, expected) and value != expected
    ]


def is_positive(value: Any) -> bool:
    """Return whether a value is a number above 0 that fits a float; JSON's integers may not."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 < value <= sys.float_info.max
