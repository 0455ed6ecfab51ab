"""Hold a port by others: how it is built, how it is called, and its package."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version

from jax_attn.parity import Pair, TrainingPair
from jax_attn.parity.pair.pair import Given

PACKAGES = {
    "flax": ("0.12.8", "pip install flax==0.12.8"),
    "optax": ("0.2.8", "pip install optax==0.2.8"),
    "keras-hub": (
        "0.32.0",
        "pip install --no-deps keras-hub==0.32.0 kagglehub kagglesdk sentencepiece && "
        "pip install keras==3.15.1 transformers==5.24.0",
    ),
    "zeromodels": (
        "1.3.6",
        "pip install --no-deps zeromodels==1.3.6 && "
        "pip install keras==3.15.1 transformers==5.24.0 matplotlib sentencepiece",
    ),
}
"""Package -> the version that the page speaks of, and how it is installed."""


@dataclass(frozen=True)
class Subject:
    """A port with its reference.

    Attributes:
      pair: both, with inputs that pad nothing.
      further: other inputs of the same pair, by the name of the column that shows them, such as
        "padding".
    """

    pair: Pair | TrainingPair
    further: Mapping[str, Given] = field(default_factory=dict)


@dataclass(frozen=True)
class Port:
    """A port by others.

    Attributes:
      name: its name on the page; unique.
      package: the distribution that has it.
      make: dtype -> its subject. What it raises is the reason why the port cannot be built.
      dtypes: those that it is checked in. In all but the first, only `pair` itself is checked.
    """

    name: str
    package: str
    make: Callable[[str], Subject]
    dtypes: Sequence[str] = ("float32", "bfloat16")

    @property
    def installed(self) -> str | None:
        """The installed version of its package; None if it is absent."""
        try:
            return version(self.package)
        except PackageNotFoundError:
            return None
