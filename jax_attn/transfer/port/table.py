"""The table that a port goes by: a family's, as the config names it, or the caller's own."""

from collections.abc import Iterable
from types import MappingProxyType
from typing import NamedTuple

from jax_attn.transfer.families import Config, Family, Place, Traits
from jax_attn.transfer.families.config import reading
from jax_attn.transfer.problems import Problem, TransferError
from jax_attn.transfer.table.layout import Layout
from jax_attn.transfer.table.rows import bindings, filled
from jax_attn.transfer.table.step import HeadSizes


class Table(NamedTuple):
    """What a port goes by.

    sizes: None where nobody says; needed where a step of the layout asks for them. blocks: where
    attention is and what it does, where the family is known. config: {} where there is no family.
    beside: the family's table of all but blocks, and the Flax parts of it that a file may lack.
    """

    layout: Layout
    sizes: HeadSizes | None
    blocks: tuple[tuple[Place, Traits], ...] = ()
    config: Config = MappingProxyType({})
    beside: tuple[Layout, frozenset[str]] = (Layout(), frozenset())


def by_family(
    family: Family, config: Config, keys: Iterable[str], paths: Iterable[str] = ()
) -> Table:
    """The table of a file with these torch keys. Raises TransferError for a config that is wrong.

    keys: those of an earlier file, where a Flax side goes back to it; where nobody knows them,
    none, and the Flax `paths`: they are spelt as the family usually does.
    """
    keys = list(keys)
    places = family.blocks(config, keys) or _written(family, config, paths)
    blocks = tuple((place, family.traits(config, place.torch)) for place in places)
    if len({traits.sizes for _, traits in blocks}) > 1:
        text = f"expected heads of one size in all blocks, got {[t.sizes for _, t in blocks]}"
        raise TransferError("reading the config", [Problem("refused", "config.json", text)])
    sizes = blocks[0][1].sizes if blocks else None
    layout, beside = family.model(config, keys).spelled_as(keys), family.beside(config, keys)
    return Table(layout, sizes, blocks, config, beside)


def by_layout(
    layout: Layout,
    config: Config,
    *,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
) -> Table:
    """A table of the caller's, with N, K and H as they or the config say.

    Raises TransferError where the two disagree.
    """
    with reading(config) as read:
        said = {
            "num_heads": read.number("num_attention_heads", "n_head", "num_heads", default=None),
            "num_kv_heads": read.number("num_key_value_heads", "num_kv_heads", default=None),
            "head_dim": read.number("head_dim", "d_kv", default=None),
        }
        D = read.number("hidden_size", "n_embd", "d_model", default=None)
    given = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    problems = [
        Problem("ambiguous", name, f"expected {said[name]}, as config.json has it, got {value}")
        for name, value in given.items()
        if None not in (value, said[name]) and value != said[name]
    ]
    if problems:
        raise TransferError("heads", problems)
    N, K, H = (given[name] or said[name] for name in given)
    H = H or (D // N if D and N else None)
    return Table(layout, HeadSizes(N, K or N, H) if N and H else None)


def _written(family: Family, config: Config, paths: Iterable[str]) -> list[Place]:
    """The blocks of a Flax side."""
    paths, found = list(paths), {}
    for place in family.places:
        torch = ".".join(filter(None, (family.root(config, ()), place.torch)))
        for binding in bindings([f"{place.flax}.q_proj.kernel"], paths):
            made = Place(*filled((torch, place.flax), binding))
            found.setdefault(made.flax, made)
    return [*found.values()]
