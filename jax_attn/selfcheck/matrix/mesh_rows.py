"""The rows of `jax-attn verify --mesh`, and the meshes that they are run on."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import jax
from jax.sharding import AxisType, Mesh

from jax_attn.selfcheck.matrix.cases import SHAPES, Case
from jax_attn.selfcheck.matrix.rows import FACTORS, published

DATA, HEADS = "data", "heads"
KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
_SHAPES = ("parts", "shared_parts")


@dataclass(frozen=True)
class MeshCase:
    """A row on a mesh. data, heads: devices along the batch and along the heads. kind: of KINDS."""

    case: Case
    data: int
    heads: int
    kind: str

    @property
    def name(self) -> str:
        return f"{self.case.name}-{self.kind}"

    def mesh(self, backend: str) -> Mesh:
        sizes = (self.data, self.heads)
        devices = jax.devices(backend)[: math.prod(sizes)]
        return jax.make_mesh(sizes, (DATA, HEADS), (KINDS[self.kind],) * 2, devices=devices)


def cases(*, every: bool) -> tuple[Case, ...]:
    """Return the rows for each kind of mesh: published designs under each mask, variants under one.

    every: also variants under each mask, all on both shapes if keys may have another length, in
    float32 and bfloat16, and under several transforms.
    """
    rows = []
    for design, factors in FACTORS.items():
        masks = factors.masks if every or design in published() else factors.masks[-1:]
        shapes = _SHAPES if "cross" in factors.shapes else _SHAPES[:1]
        for i, mask in enumerate(masks):
            if not every:
                rows.append(Case(design, "float32", mask, shapes[i % len(shapes)], "jit"))
                continue
            for shape in shapes:
                dtypes = [d for d in ("float32", "bfloat16") if d in factors.dtypes]
                rows += [
                    Case(design, dtype, mask, shape, transform)
                    for dtype in dtypes
                    for transform in ("jit", "grad", "eager")[: 3 if dtype == "float32" else 1]
                ]
    return tuple(rows)


def problems(sizes: Mapping[str, int]) -> list[str]:
    """List why a mesh of these sizes cannot shard the rows."""
    most = {
        DATA: ("rows", math.gcd(*(SHAPES[shape].B for shape in _SHAPES))),
        HEADS: ("heads", math.gcd(*(SHAPES[shape].N for shape in _SHAPES))),
    }
    if math.prod(sizes.values()) == 1:
        return ["expected more than one device"]
    return [
        f"{name}: expected a number of devices that divides {most[name][1]} {most[name][0]}, "
        f"got {size}"
        for name, size in sizes.items()
        if most[name][1] % size
    ]
