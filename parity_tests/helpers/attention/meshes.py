"""Meshes of eight CPU devices, and what a compiled program sends between them."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_attn.parity.run.traffic import sent

KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


def mesh(kind: str, **sizes: int) -> jax.sharding.Mesh:
    """Axes of these sizes, all auto or all explicit."""
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), (KINDS[kind],) * len(sizes))


def placed(on: jax.sharding.Mesh, arrays: Sequence[Any], specs: Sequence[PartitionSpec]) -> list:
    """The arrays as the specs cut them."""
    pairs = zip(arrays, specs, strict=True)
    return [jax.device_put(x, NamedSharding(on, spec)) for x, spec in pairs]


def collectives(program: jax.stages.Compiled) -> dict[str, int]:
    """How many of each kind a program has."""
    return dict(Counter(each.kind for each in sent(program.as_text())))


def assert_near(found: Any, wanted: Any, near: Any, *, additions: int, passes: int = 1) -> None:
    """Equal but for so many additions in each pass, in another order.

    Each errs as an input or a parameter that is moved by its last bit. near: what that gives.
    """
    pairs = [*zip(*map(jax.tree.leaves, (found, wanted, near)), strict=True)]
    allowed = passes * additions * max(np.abs(n - w).max() for _, w, n in pairs)
    assert max(np.abs(np.asarray(got) - want).max() for got, want, _ in pairs) <= allowed
    assert allowed < 1e-9 * max(np.abs(want).max() for _, want, _ in pairs)


def moved(model: nnx.Module, unit: float = 2.0**-53) -> nnx.Module:
    """The module, with every parameter moved by its last bit, up or down: for `near`.

    unit: the roundoff of the parameters' dtype, float64's unless given.
    """
    rng = np.random.default_rng(1)
    for _, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        value = variable.get_value()
        by = 1 + unit * rng.choice([-2, 2], value.shape)
        variable.set_value(value * by.astype(value.dtype))
    return model
