"""Digests of tensors: what is left of a reference's weights when it travels without them."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np

from jax_attn.transfer import as_numpy
from jax_attn.transfer.arrays import LazyMapping, Spec, chunks, describe


class Digest(NamedTuple):
    """A tensor without its numbers: its shape, its dtype, and the SHA-256 of its bytes."""

    shape: tuple[int, ...]
    dtype: str
    sha256: str

    @classmethod
    def of(cls, array: np.ndarray) -> Self:
        """Read an array, in C order whatever its strides."""
        read = hashlib.sha256()
        for chunk in chunks(array):
            read.update(chunk.data)
        return cls(*describe(array), read.hexdigest())


@dataclass(eq=False)
class Digests(LazyMapping[Digest]):
    """The digests of named tensors, in place of the tensors.

    A transfer table reads shapes and dtypes by `describe`, and by `mapped` whether two tensors are
    equal.
    """

    digests: Mapping[str, Digest]

    def __post_init__(self) -> None:
        super().__init__(self.digests)

    @classmethod
    def of(cls, tensors: Mapping[str, Any]) -> Self:
        """Read tensors of any framework, one at a time."""
        return cls({name: Digest.of(as_numpy(x, name)) for name, x in tensors.items()})

    def __getitem__(self, name: str) -> Digest:
        return self.digests[name]

    def describe(self, name: str) -> Spec:
        """Return the shape and dtype of a tensor."""
        digest = self.digests[name]
        return Spec(digest.shape, digest.dtype)

    def mapped(self, name: str) -> np.ndarray:
        """Return bytes that are equal for equal tensors: the digest's."""
        return np.frombuffer(repr(self.digests[name]).encode(), np.uint8)


def difference(want: Any, got: np.ndarray) -> str:
    """Say in what a tensor differs from another of the same shape and dtype; "" if in no bit.

    want: a tensor of any framework, or its `Digest`, which cannot tell the elements.
    """
    if isinstance(want, Digest):
        return "" if Digest.of(got) == want else "by its digest, in elements that it cannot tell"
    want = as_numpy(want)
    if got.tobytes() == want.tobytes():
        return ""
    return f"in {int((got != want).sum())} of {got.size} elements"
