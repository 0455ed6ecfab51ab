"""The ports of the gallery: a file a package, or one of a dozen lines a port."""

import importlib
from collections.abc import Iterator

from gallery.port import Port

FILES = (
    "flax_layers",
    "optax_optimizers",
    "keras_hub_text",
    "keras_hub_images",
    "zeromodels_text",
)


def every() -> Iterator[Port]:
    """Yield every port. The files import no package that may be absent."""
    for name in FILES:
        yield from importlib.import_module(f"gallery.ports.{name}").PORTS
