"""MXFP4 tensors as plain bfloat16, each dequantized when it is read.

For a stack `NAME` of matrices (X, in, out) a file has two tensors of bytes: `NAME_blocks` (X, out,
in/32, 16) with two numbers of 4 bits in each byte, the low half first, and `NAME_scales` (X, out,
in/32) with the exponent of each 32 numbers, plus 127 (Open Compute Project, "OCP Microscaling
Formats", 2023). bfloat16 holds every such number in its range exactly.
"""

from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

from jax_attn.transfer.arrays import LazyMapping, Spec, Tensors, read, specs
from jax_attn.transfer.problems import Problem

_BLOCKS, _SCALES = "_blocks", "_scales"
_BYTES = 16
"""Bytes that share a scale."""

_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

_ROWS = 64
"""Rows that are transposed at a time: a whole matrix takes several times as long (cache misses)."""


@cache
def _pairs() -> np.ndarray:
    """Return the two bfloat16 numbers, as one of 32 bits, at 256 · scale + byte: (65536,)."""
    four_bits = np.array([*_POSITIVE, *(-x for x in _POSITIVE)])
    wide = np.ldexp(four_bits, np.arange(-127, 129)[:, None])
    with np.errstate(over="ignore"):  # beyond bfloat16's range, by the largest scales
        numbers = wide.astype(ml_dtypes.bfloat16)
    byte = np.arange(256)
    both = np.stack([numbers[:, byte & 15], numbers[:, byte >> 4]], axis=-1)
    return both.view(np.uint32).reshape(-1)


def dequantized(tensors: Tensors) -> "tuple[Dequantized, list[Problem]]":
    """Return the tensors with each stack under its plain name, and the reasons why some have none.

    Stacks are found by their keys; all other tensors are as they were.
    """
    by_key, _ = specs(tensors)
    names = {key.removesuffix(_BLOCKS) for key in by_key if key.endswith(_BLOCKS)}
    names |= {key.removesuffix(_SCALES) for key in by_key if key.endswith(_SCALES)}
    problems = [problem for name in sorted(names) for problem in _problems(name, by_key)]
    wrong = {problem.name.removesuffix(_BLOCKS).removesuffix(_SCALES) for problem in problems}
    stacks = {f"{name}{_BLOCKS}": name for name in names - wrong}
    return Dequantized(tensors, stacks, by_key), problems


def _problems(name: str, by_key: dict[str, Spec]) -> list[Problem]:
    blocks, scales = f"{name}{_BLOCKS}", f"{name}{_SCALES}"
    if missing := [key for key in (blocks, scales) if key not in by_key]:
        text = f"expected it beside the other half of {name}, which is MXFP4"
        return [Problem("missing", missing[0], text)]
    if name in by_key:
        text = f"expected either MXFP4 or plain numbers, got {blocks} and {name}"
        return [Problem("doubly written", blocks, text)]
    (shape, kind), (scale_shape, scale_kind) = by_key[blocks], by_key[scales]
    fits = len(shape) == 4 and shape[-1] == _BYTES and shape[:-1] == scale_shape
    if not fits or {kind, scale_kind} != {"uint8"}:
        text = f"expected bytes (X, out, in/32, {_BYTES}), and scales of the first three axes, got "
        return [Problem("wrong shape", blocks, f"{text}{by_key[blocks]} and {by_key[scales]}")]
    return []


class Dequantized(LazyMapping[Any]):
    """Tensors of which some are stacks in MXFP4. stacks: the keys of their blocks -> their names.

    `read` gives one stack at a time, in bfloat16.
    """

    def __init__(self, tensors: Tensors, stacks: dict[str, str], by_key: dict[str, Spec]):
        scales = {f"{name}{_SCALES}" for name in stacks.values()}
        super().__init__(stacks.get(key, key) for key in tensors if key not in scales)
        self._tensors, self._specs, self._stacks = tensors, by_key, {*stacks.values()}
        self.path = getattr(tensors, "path", None)

    def __getitem__(self, key: str) -> Any:
        return self._stack(key) if key in self._stacks else self._tensors[key]

    def describe(self, key: str) -> Spec:
        """Return shape and dtype name of one tensor, without reading it if that is possible."""
        if key not in self._stacks:
            lazy = getattr(self._tensors, "describe", None)
            return lazy(key) if lazy else self._specs[key]
        X, fan_out, blocks, _ = self._specs[f"{key}{_BLOCKS}"].shape
        return Spec((X, blocks * _BYTES * 2, fan_out), "bfloat16")

    def tied(self) -> dict[str, str]:
        """Map each key whose tensor occupies another key's memory to that other key."""
        ties: dict[str, str] = getattr(self._tensors, "tied", dict)()
        return {key: same for key, same in ties.items() if key in self and same in self}

    def mapped(self, key: str) -> Any:
        """Return one tensor for immediate use, uncopied if that is possible."""
        return self._stack(key) if key in self._stacks else read(self._tensors, key)

    def _stack(self, key: str) -> np.ndarray:
        blocks, scales = (read(self._tensors, f"{key}{part}") for part in (_BLOCKS, _SCALES))
        stack = np.empty(self.describe(key).shape, ml_dtypes.bfloat16)
        # As integers, which NumPy copies faster. One matrix at a time, since each is small.
        for matrix, block, scale in zip(stack.view(np.uint16), blocks, scales, strict=True):
            at = scale[..., None].astype(np.uint16) << 8 | block
            rows = _pairs().take(at).view(np.uint16).reshape(matrix.shape[::-1])
            for n in range(0, len(rows), _ROWS):
                matrix[:, n : n + _ROWS] = rows[n : n + _ROWS].T
        return stack
