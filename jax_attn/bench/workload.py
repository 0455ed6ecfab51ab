"""What is computed: one attention, or one layer of it, and in which modes it is measured."""

from dataclasses import dataclass

MODES = FORWARD, BACKWARD = ("forward", "forward+backward")
CACHED = PREFILL, DECODE = ("prefill", "decode")  # with a cache of keys and values
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
DTYPES = tuple(_BYTES)


@dataclass(frozen=True)
class Workload:
    """What is computed. The letters are the package's own.

    layer: a whole module, with its four projections of embed_dim D, on (B, T, D); else
    attention alone, on query (B, T, N, H), key and value (B, S, K, H), and D is 0.
    room: 0, and is_causal has its corner top-left; or the places of a cache that the T tokens
    are read into, S - T being there before, and a token sees all up to itself.
    """

    name: str
    layer: bool
    B: int
    T: int
    S: int
    N: int
    K: int
    H: int
    D: int = 0
    is_causal: bool = False
    dtype: str = "float32"
    room: int = 0

    @property
    def modes(self) -> tuple[str, ...]:
        """In which it can be measured: those of a cache are one token a row, or more."""
        if not self.room:
            return MODES
        return (DECODE,) if self.T == 1 else (PREFILL,)

    @property
    def filled(self) -> int:
        """How many tokens a row's cache holds before the call."""
        return self.S - self.T if self.room else 0

    @property
    def cached_bytes(self) -> int:
        """Keys and values of all S tokens: what attention to a cache must read at least."""
        return 2 * self.B * self.S * self.K * self.H * _BYTES[self.dtype] if self.room else 0

    @property
    def pairs(self) -> int:
        """How many (query, key) pairs of one head may attend."""
        if not self.is_causal:
            return self.T * self.S
        full = min(self.T, self.S)  # query i sees keys 0…i, and what was there before
        seen = full * (full + 1) // 2 + max(self.T - self.S, 0) * self.S
        return seen + self.T * self.filled

    def flops(self, mode: str) -> int:
        """Useful floating-point operations of one call: the one formula for every row.

        FlashAttention's convention: two products forward, of 2·H per visible pair and query
        head, and five backward, the scores again, dV, dP, dQ and dK: counted alike for who keeps
        the scores and for who recomputes them, and nothing else that is done twice. A layer adds
        its four projections, 2·D per number they make, and twice as much again backward. Softmax
        and masks count nothing.
        """
        core = 2 * self.B * self.N * self.pairs * self.H
        width = 2 * self.N * self.H * self.T + 2 * self.K * self.H * self.S
        projections = 2 * self.B * self.D * width if self.layer else 0
        if mode == BACKWARD:
            return (2 + 5) * core + 3 * projections
        return 2 * core + projections

    def scores_bytes(self, mode: str) -> int:
        """The least peak of an implementation that writes every score.

        Scores and their softmax in float32 forward; as much again for their gradients.
        """
        return 4 * self.B * self.N * self.T * self.S * (4 if mode == BACKWARD else 2)
