"""Meshes of eight CPU devices, and what a compiled program sends between them."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
_COLLECTIVE = re.compile(
    r" (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(?:-start)?\("
)


def mesh(kind: str, **sizes: int) -> jax.sharding.Mesh:
    """Axes of these sizes, all auto or all explicit."""
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), (KINDS[kind],) * len(sizes))


def placed(on: jax.sharding.Mesh, arrays: Sequence[Any], specs: Sequence[PartitionSpec]) -> list:
    """The arrays as the specs cut them."""
    pairs = zip(arrays, specs, strict=True)
    return [jax.device_put(x, NamedSharding(on, spec)) for x, spec in pairs]


def collectives(program: jax.stages.Compiled) -> dict[str, int]:
    """How many of each kind a program has."""
    return dict(Counter(_COLLECTIVE.findall(program.as_text())))
