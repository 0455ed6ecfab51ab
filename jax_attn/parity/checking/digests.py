"""Digests of tensors: what is left of a reference's weights when it travels without them."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import numpy as np

from jax_attn.transfer import Problem, TransferError, as_numpy
from jax_attn.transfer.arrays import LazyMapping, Spec, chunks, describe, why_unreadable


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

    Attributes:
      digests: name -> digest.
      unreadable: name -> why the value has no digest, such as the extra state of a module. Reading
        it raises TransferError, as reading the value itself does.
    """

    digests: Mapping[str, Digest]
    unreadable: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__((*self.digests, *self.unreadable))

    @classmethod
    def of(cls, tensors: Mapping[str, Any]) -> Self:
        """Read tensors of any framework, one at a time."""
        whys = {name: why for name, x in tensors.items() if (why := why_unreadable(x))}
        readable = {name: x for name, x in tensors.items() if name not in whys}
        return cls({name: Digest.of(as_numpy(x, name)) for name, x in readable.items()}, whys)

    def __getitem__(self, name: str) -> Digest:
        if why := self.unreadable.get(name):
            raise TransferError(f"reading {name!r}", [Problem("unreadable", name, why)])
        return self.digests[name]

    def describe(self, name: str) -> Spec:
        """Return the shape and dtype of a tensor."""
        digest = self[name]
        return Spec(digest.shape, digest.dtype)

    def mapped(self, name: str) -> np.ndarray:
        """Return bytes that are equal for equal tensors: the digest's."""
        return np.frombuffer(repr(self[name]).encode(), np.uint8)


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
