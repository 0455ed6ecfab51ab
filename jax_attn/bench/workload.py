"""What is computed: one attention, or one layer of it, and in which modes it is measured."""

from dataclasses import dataclass, field

MODES = FORWARD, BACKWARD = ("forward", "forward+backward")
CACHED = PREFILL, DECODE = ("prefill", "decode")  # with a cache of keys and values
STEP = "training-step"
PAIR_MODES = (*MODES, STEP)
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
DTYPES = tuple(_BYTES)


@dataclass(frozen=True)
class Workload:
    """The sizes of what is computed, in the letters of the package's dimension key.

    layer: True for a whole module with its four projections of embed_dim D, on (B, T, D); False
    for attention alone, on query (B, T, N, H), key and value (B, S, K, H), with D = 0.
    room: 0 without a cache; is_causal then has its corner top-left. Else the number of places in
    a cache that holds S − T tokens and reads T more, each of which sees all up to itself.
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
        """The modes in which it can be measured; with a cache, DECODE reads one token per row."""
        if not self.room:
            return MODES
        return (DECODE,) if self.T == 1 else (PREFILL,)

    @property
    def filled(self) -> int:
        """How many tokens per row the cache holds before the call."""
        return self.S - self.T if self.room else 0

    @property
    def cached_bytes(self) -> int:
        """Keys and values of all S tokens: the least that attention over a cache reads."""
        return 2 * self.B * self.S * self.K * self.H * _BYTES[self.dtype] if self.room else 0

    @property
    def pairs(self) -> int:
        """How many (query, key) pairs of one head are visible."""
        if not self.is_causal:
            return self.T * self.S
        full = min(self.T, self.S)  # query i sees keys 0…i, and all that the cache held
        seen = full * (full + 1) // 2 + max(self.T - self.S, 0) * self.S
        return seen + self.T * self.filled

    def flops(self, mode: str) -> int:
        """Useful floating-point operations of one call, the same for every implementation.

        FlashAttention's convention: two products forward, each of 2·H per visible pair and query
        head, and five backward (the scores again, dV, dP, dQ, dK), whether an implementation keeps
        or recomputes the scores. A layer adds its four projections, 2·D per output number, and
        twice that backward. Softmax and masks are not counted.
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


class PairError(ValueError):
    """Why there is no pair to compare; the message stands by itself."""


@dataclass(frozen=True)
class PairWorkload:
    """A user's own pair.

    name: the function that makes it, or the checkpoint. inputs: names, dtypes and shapes, in a
    line. dtype: of the parameters. counted: (mode, operations of the reference's products and
    convolutions in a call). length: of the inputs, where several are measured; else 0.
    read: (mode, bytes that a call reads: every parameter but embeddings' own, and the cache of a
    step), for modes without gradients. Neither of the two tells workloads apart: a run has them
    for its own modes alone.
    """

    name: str
    inputs: str
    dtype: str
    counted: tuple[tuple[str, int], ...] = field(default=(), compare=False)
    length: int = 0
    read: tuple[tuple[str, int], ...] = field(default=(), compare=False)

    def flops(self, mode: str) -> int:
        """As counted, the same for every way to run the pair."""
        return dict(self.counted)[mode]
