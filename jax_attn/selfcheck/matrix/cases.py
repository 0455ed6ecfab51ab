"""A row of the built-in matrix, and the shapes that rows have.

A row is one design in one dtype under one mask, on one shape, run under one transform. The programs
of calibration have shapes of their own in the same table.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Size:
    """B batch, T and S query and key length, N and K query and key/value heads, D embed_dim."""

    B: int
    T: int
    S: int
    N: int
    K: int
    D: int

    @property
    def work(self) -> int:
        """A rough count of the products of numbers in attention and its projections."""
        return self.B * self.T * self.D * (self.S + self.D)


SHAPES = {
    # The matrix's. The seeds' own sizes have the seeds' 8 heads; K is for grouped attention.
    "square": Size(B=2, T=8, S=8, N=6, K=3, D=24),
    "prime": Size(B=3, T=13, S=13, N=10, K=2, D=70),
    "cross": Size(B=2, T=5, S=11, N=6, K=3, D=42),
    "token": Size(B=2, T=1, S=1, N=6, K=3, D=30),
    "seed000": Size(B=2, T=5, S=5, N=8, K=2, D=64),
    "seed001": Size(B=32, T=10, S=10, N=8, K=4, D=64),
    "seed002": Size(B=2, T=10, S=10, N=8, K=2, D=512),
    "seed003": Size(B=1, T=10, S=10, N=8, K=4, D=512),
    # The matrix's that cross edges of the shipped tiles and pages: prime, with no more scores than
    # one edge needs. The edges are of tiles of keys, of queries, of both under a banded mask, and
    # of heads; the last is of pages.
    "long_keys": Size(B=1, T=37, S=1031, N=4, K=2, D=12),
    "long_queries": Size(B=1, T=1031, S=37, N=4, K=2, D=12),
    "long_band": Size(B=1, T=521, S=263, N=4, K=2, D=12),
    "many_heads": Size(B=1, T=257, S=67, N=18, K=6, D=36),
    "two_pages": Size(B=1, T=523, S=523, N=4, K=2, D=12),
    # Those of rows on meshes, whose batch and heads are sharded: each device has several key/value
    # heads of its own, or shares one with other devices.
    "parts": Size(B=4, T=7, S=7, N=16, K=8, D=80),
    "shared_parts": Size(B=4, T=3, S=11, N=16, K=2, D=80),
    # Calibration's: few scores, as each configuration is run about twenty times, but enough rows
    # for gradients of many numbers; the error of only a few would mean little.
    "mha": Size(B=2, T=11, S=7, N=3, K=3, D=48),
    "gqa": Size(B=1, T=13, S=11, N=4, K=2, D=60),
    "mqa": Size(B=1, T=11, S=13, N=5, K=1, D=70),
    "512": Size(B=1, T=11, S=521, N=2, K=1, D=32),
    "1024": Size(B=1, T=7, S=1031, N=2, K=2, D=32),
    "2048": Size(B=1, T=5, S=2039, N=1, K=1, D=32),
}

TILE_EDGES = ("long_keys", "long_queries", "long_band", "many_heads", "two_pages")
"""The shapes that cross edges of the shipped tiles or pages; all others fit in one of each."""


@dataclass(frozen=True)
class Case:
    """One row. `design`: a key of `PORTED_DESIGNS`, a published design or a variant of one."""

    design: str
    dtype: str
    mask: str
    shape: str
    transform: str

    @property
    def name(self) -> str:
        return "-".join((self.design, self.dtype, self.mask, self.shape, self.transform))

    @property
    def family(self) -> str:
        """The published design."""
        return self.design.partition("/")[0]

    @property
    def size(self) -> Size:
        return SHAPES[self.shape]

    @property
    def levels(self) -> tuple[tuple[str, str], ...]:
        """(factor, level) of each factor; a variant counts as its design."""
        own = ("dtype", "mask", "shape", "transform")
        return ("design", self.family), *((factor, getattr(self, factor)) for factor in own)

    @property
    def preparation(self) -> tuple[str, ...]:
        """The key of rows that differ only in their transform, and share the reference's side."""
        return (self.design, self.dtype, self.mask, self.shape)
