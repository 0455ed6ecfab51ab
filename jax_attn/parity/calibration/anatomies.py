"""What the blocks are made of that calibration draws. Imports nothing: names alone."""

from dataclasses import dataclass

TOKENS, PADDING = 11, 0
"""Token ids of a block that reads tokens, and the one that fills a shorter row."""


@dataclass(frozen=True)
class Anatomy:
    """A block: attention and an MLP behind norms; by name, parts that `blocks` has on both sides.

    hide: how a key that may not be seen is hidden in scores that are written out; None: by a
    fused function. buckets: whether a learnt bias of the distance's bucket is added to the scores.
    tokens: whether the block reads token ids through an embedding.
    """

    hide: str | None = None
    norm: str = "layer"
    mlp: str = "gelu"
    buckets: bool = False
    tokens: bool = False


# No ReLU: in bfloat16 one of hundreds of its inputs lies within rounding of 0, where correct code
# takes either derivative, and perturbed runs may have taken one alone.
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
