"""The table of a port: a family's, as the config names it, or the caller's own."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from jax_attn.families import Config
from jax_attn.families.config import SIZES, Reading, disagreements, reading
from jax_attn.families.family import Family, Prefixes
from jax_attn.families.traits import Traits
from jax_attn.transfer.problems import Problem, TransferError
from jax_attn.transfer.table.layout import Layout
from jax_attn.transfer.table.rows import bindings, filled
from jax_attn.transfer.table.steps import Sizes


class PortTable(NamedTuple):
    """Table of a port, with what is known of the file.

    sizes: None if unknown; needed if a step of the layout uses them. blocks: places and traits of
    attention, if the family is known. config: {} without a family. beside: the family's table
    without blocks, and its Flax parts that a file may lack.
    """

    layout: Layout
    sizes: Sizes | None
    blocks: tuple[tuple[Prefixes, Traits], ...] = ()
    config: Config = MappingProxyType({})
    beside: tuple[Layout, frozenset[str]] = (Layout(), frozenset())


def by_family(
    family: Family, config: Config, keys: Iterable[str], paths: Iterable[str] = ()
) -> PortTable:
    """Return the table of a file with these torch keys. Raises TransferError for an invalid config.

    keys: for a port to torch, those of the original file; if unknown, none: keys are then derived
    from the Flax `paths`, spelled as usual in the family.
    """
    keys = list(keys)
    places = family.blocks(config, keys) or _blocks_of_paths(family, config, paths)
    blocks = tuple((place, family.traits(config, place.torch)) for place in places)
    if len({traits.sizes for _, traits in blocks}) > 1:
        text = f"expected heads of one size in all blocks, got {[t.sizes for _, t in blocks]}"
        raise TransferError("reading the config", [Problem("refused", "config.json", text)])
    sizes = blocks[0][1].sizes if blocks else None
    layout, beside = family.model(config, keys).spelled_as(keys), family.beside(config, keys)
    return PortTable(layout, sizes, blocks, config, beside)


def by_layout(layout: Layout, config: Config, heads: Mapping[str, int | None]) -> PortTable:
    """Return a table of the caller's, with the heads that the caller or the config names.

    heads: N, K and H in this order, by the names of their options; None if not given. Raises
    TransferError if the two disagree.
    """
    with reading(config) as read:
        D, *from_config = (read.number(*names, default=None) for names in SIZES)
    if problems := disagreements(heads, from_config):
        raise TransferError("heads", problems)
    N, K, H = (a or b for a, b in zip(heads.values(), from_config, strict=True))
    H = H or (D // N if D and N else None)
    return PortTable(layout, Sizes(N, K or N, H) if N and H else None)


def _blocks_of_paths(family: Family, config: Config, paths: Iterable[str]) -> list[Prefixes]:
    """Return the blocks of a Flax side."""
    paths = list(paths)
    places: dict[str, Prefixes] = {}
    for pattern in family.places_in(Reading(config)):
        torch = ".".join(filter(None, (family.root(config, ()), pattern.torch)))
        for binding in bindings([f"{pattern.flax}.q_proj.kernel"], paths):
            place = Prefixes(*filled((torch, pattern.flax), binding))
            places.setdefault(place.flax, place)
    return [*places.values()]
