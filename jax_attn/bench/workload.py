"""Workloads: an attention call or an attention layer, and the modes in which it is measured."""

from dataclasses import dataclass, field

MODES = FORWARD, BACKWARD = ("forward", "forward+backward")
CACHED = PREFILL, DECODE = ("prefill", "decode")  # with a cache of keys and values
STEP = "training-step"
CACHE = "cache"
"""The name of the cache in the state of calls, which `DECODE` reads and writes."""
PAIR_MODES = (*MODES, STEP)
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
DTYPES = tuple(_BYTES)


@dataclass(frozen=True)
class Workload:
    """The sizes of a computation, in the letters of the package's dimension key.

    layer: True for a whole module with its four projections of embed_dim D, on (B, T, D); False
    for attention only, on query (B, T, N, H), key and value (B, S, K, H), with D = 0.
    room: 0 without a cache; the causal mask is then aligned to the top left. Otherwise the capacity
    of a cache that holds S − T tokens and reads T more, each of which sees all up to itself.
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
        """The modes in which it can be measured; with a cache, DECODE if T is 1, else PREFILL."""
        if not self.room:
            return MODES
        return (DECODE,) if self.T == 1 else (PREFILL,)

    @property
    def filled(self) -> int:
        """The number of tokens per row that the cache holds before the call."""
        return self.S - self.T if self.room else 0

    @property
    def cached_bytes(self) -> int:
        """Bytes of the keys and values of all S tokens: the least that cached attention reads."""
        return 2 * self.B * self.S * self.K * self.H * _BYTES[self.dtype] if self.room else 0

    @property
    def pairs(self) -> int:
        """The number of visible (query, key) pairs of one head."""
        if not self.is_causal:
            return self.T * self.S
        full = min(self.T, self.S)  # query i sees keys 0…i, and all that the cache held
        seen = full * (full + 1) // 2 + max(self.T - self.S, 0) * self.S
        return seen + self.T * self.filled

    def flops(self, mode: str) -> int:
        """Count the useful floating-point operations of one call, the same for all implementations.

        This follows FlashAttention's convention: two products forward, each of 2·H per visible pair
        and query head, and five backward (the scores again, dV, dP, dQ, dK), whether an
        implementation keeps or recomputes the scores. A layer adds its four projections, 2·D per
        output element, and twice that backward. Softmax and masks are not counted.
        """
        core = 2 * self.B * self.N * self.pairs * self.H
        width = 2 * self.N * self.H * self.T + 2 * self.K * self.H * self.S
        projections = 2 * self.B * self.D * width if self.layer else 0
        if mode == BACKWARD:
            return (2 + 5) * core + 3 * projections
        return 2 * core + projections

    def scores_bytes(self, mode: str) -> int:
        """Return the least peak, in bytes, of an implementation that materializes every score.

        It holds the scores and their softmax in float32, and as much again for their gradients.
        """
        return 4 * self.B * self.N * self.T * self.S * (4 if mode == BACKWARD else 2)


@dataclass(frozen=True)
class PairWorkload:
    """A user's own pair.

    name: the function that makes it, or the checkpoint. inputs: names, dtypes and shapes, in one
    line. dtype: the dtype of the parameters. length: the length of the inputs if several are
    measured, else 0.
    counted: (mode, operations of the reference's products and convolutions in a call).
    read: (mode, bytes that a call reads: every parameter except those of embeddings, and the cache
    in a decode step), for modes without gradients. A run has `counted` and `read` only for its own
    modes, so neither takes part in comparisons of workloads.
    """

    name: str
    inputs: str
    dtype: str
    counted: tuple[tuple[str, int], ...] = field(default=(), compare=False)
    length: int = 0
    read: tuple[tuple[str, int], ...] = field(default=(), compare=False)

    def flops(self, mode: str) -> int:
        """Return the counted operations of a call, the same for every way to run the pair."""
        return dict(self.counted)[mode]
