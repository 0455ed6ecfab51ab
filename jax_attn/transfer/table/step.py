"""What an invertible step is, read from torch to Flax.

A step holds no sizes. The Flax module has them: `source` turns the shapes behind a step into the
shapes before it, so that a row's shapes follow from its target's, and `forward` and `backward`
carry arrays from the one to the other. Where there is no module, `target` turns the shapes before
a step into those behind it, by the `HeadSizes` that cannot be inferred from torch shapes.

Letters: N query heads, or either kind, K key/value heads, G = N // K, H head_dim, D a width.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

Shape = tuple[int, ...]
Shapes = tuple[Shape, ...]
Arrays = tuple[np.ndarray, ...]
Carry = Callable[[Arrays, Shapes], Arrays]


class MisfitError(ValueError):
    """Shapes or dtypes that a step cannot take."""


class HeadSizes(NamedTuple):
    """N, K and H, which cannot be inferred from the shapes of flat projections."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, repr=False)
class Step:
    """One invertible step on the arrays of a row.

    source(shapes behind, number of torch keys) -> shapes before; raises MisfitError.
    target(shapes before, number of Flax paths, sizes) -> shapes behind; raises MisfitError.
    forward(arrays, shapes behind) and backward(arrays, shapes before) -> arrays, bit for bit.
    fan: "each" maps array by array, "split" turns one torch tensor into several Flax arrays,
        "join" several torch tensors into one Flax array.
    """

    name: str
    source: Callable[[Shapes, int], Shapes]
    target: Callable[[Shapes, int, HeadSizes], Shapes]
    forward: Carry
    backward: Carry
    fan: Literal["each", "split", "join"] = "each"

    def __repr__(self) -> str:
        return self.name


def expect(step: str, shape: Shape, expected: str, fits: bool, side: str = "Flax") -> None:
    """Raise MisfitError unless the shape fits."""
    if not fits:
        raise MisfitError(f"{step} expects {expected} on the {side} side, got {list(shape)}")
