"""The blocks that calibration draws, by the names of their parts. Imports no framework."""

from dataclasses import dataclass

TOKENS, PADDING = 11, 0
"""The number of token ids, and the id that pads a shorter row."""


@dataclass(frozen=True)
class Anatomy:
    """A block of attention and an MLP, each after a norm, by the names of its parts in `blocks`.

    hide: how written-out attention hides a masked key; None for a fused function. buckets: whether
    a learned bias for each bucket of distances is added to the scores. tokens: whether the block
    reads token ids through an embedding.
    """

    hide: str | None = None
    norm: str = "layer"
    mlp: str = "gelu"
    buckets: bool = False
    tokens: bool = False


# No ReLU: in bfloat16, about one in a hundred inputs lies within rounding of 0. There, correct code
# may take either derivative, while all perturbed runs may have taken the same one.
ANATOMIES = {
    "block": Anatomy(),
    "masked_fill": Anatomy("masked_fill(-1e9)"),
    "finfo_min": Anatomy("+ finfo.min", tokens=True),
    "minus_1e4": Anatomy("+ -1e4", mlp="tanh gelu"),
    "where": Anatomy("where(finfo.min)", norm="batch"),
    "buckets": Anatomy("+ finfo.min", buckets=True),
    "gated": Anatomy("where(finfo.min)", norm="rms", mlp="gated"),
    "experts": Anatomy("+ finfo.min", mlp="experts"),
}
