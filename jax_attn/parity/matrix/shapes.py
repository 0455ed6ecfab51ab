"""The shapes that cases and calibration's programs have. NumPy only."""

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
        """What attention and its projections cost, in products of numbers, roughly."""
        return self.B * self.T * self.D * (self.S + self.D)


SHAPES = {
    # The matrix's. The seeds' own sizes have the seeds' heads, 8; K is what grouped attention
    # makes of them.
    "square": Size(B=2, T=8, S=8, N=6, K=3, D=24),
    "prime": Size(B=3, T=13, S=13, N=10, K=2, D=70),
    "cross": Size(B=2, T=5, S=11, N=6, K=3, D=42),
    "token": Size(B=2, T=1, S=1, N=6, K=3, D=30),
    "seed000": Size(B=2, T=5, S=5, N=8, K=2, D=64),
    "seed001": Size(B=32, T=10, S=10, N=8, K=4, D=64),
    "seed002": Size(B=2, T=10, S=10, N=8, K=2, D=512),
    "seed003": Size(B=1, T=10, S=10, N=8, K=4, D=512),
    # The matrix's that cross edges of the shipped tiles and pages: prime, and no more scores than
    # one edge needs. Tiles of keys; of queries; of both, where queries see in a band; of heads.
    "long_keys": Size(B=1, T=37, S=1031, N=4, K=2, D=12),
    "long_queries": Size(B=1, T=1031, S=37, N=4, K=2, D=12),
    "long_band": Size(B=1, T=521, S=263, N=4, K=2, D=12),
    "many_heads": Size(B=1, T=257, S=67, N=18, K=6, D=36),
    "two_pages": Size(B=1, T=523, S=523, N=4, K=2, D=12),
    # Calibration's: few scores, as each configuration is run some twenty times; long rows have
    # few heads.
    "mha": Size(B=2, T=5, S=7, N=3, K=3, D=12),
    "gqa": Size(B=1, T=7, S=11, N=4, K=2, D=20),
    "mqa": Size(B=1, T=5, S=13, N=5, K=1, D=30),
    "512": Size(B=1, T=3, S=521, N=2, K=1, D=8),
    "1024": Size(B=1, T=3, S=1031, N=2, K=2, D=6),
    "2048": Size(B=1, T=2, S=2039, N=1, K=1, D=5),
}

TILE_EDGES = ("long_keys", "long_queries", "long_band", "many_heads", "two_pages")
"""The shapes that cross edges of the shipped tiles or pages; all others lie within one of each."""
