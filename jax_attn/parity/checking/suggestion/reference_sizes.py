"""Read from a reference the sizes that its inputs must fit, or should exceed."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

# Spellings of transformers' configs and of modules.
_NAMES = {
    "heads": ("num_attention_heads", "num_heads", "n_heads", "n_head", "nhead"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_kv_heads"),
    "head_dim": ("head_dim", "d_kv", "d_k"),
    "width": ("hidden_size", "d_model", "n_embd", "embed_dim", "dim"),
    "key_width": ("kdim", "encoder_hidden_size", "cross_attention_dim", "context_dim"),
    "value_width": ("vdim", "encoder_hidden_size", "cross_attention_dim", "context_dim"),
    "vocabulary": ("vocab_size",),
    "end": ("eos_token_id",),
    "positions": ("max_position_embeddings", "n_positions", "max_len", "block_size"),
    "channels": ("num_channels", "in_chans"),
    "image": ("image_size", "img_size"),
    "patch": ("patch_size",),
    "features": ("num_mel_bins",),
    "source": ("max_source_positions",),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
}
_BEYOND = re.compile(r".*(window|max_distance|max_relative|chunk_size).*")
_BUCKETS = re.compile(r".*num_buckets")
_BUCKETS_REACH = 4  # T5's 32 buckets end at a distance of 128, and other models copy this
# Classes of layers, and the attribute that holds the width of the tokens that they take.
_WIDTHS = (
    (nn.Linear, "in_features"),
    (nn.LayerNorm | nn.RMSNorm, "normalized_shape"),
    (nn.BatchNorm1d | nn.BatchNorm2d, "num_features"),
    (nn.GroupNorm, "num_channels"),
    (nn.MultiheadAttention, "embed_dim"),
)
LONGEST = 300
"""Windows and distances beyond this are ignored, as they would make every run of a check long."""


@dataclass(frozen=True)
class ReferenceSizes:
    """Sizes from the attributes of a module, its submodules and their configs, in that order."""

    module: nn.Module

    def all(self, size: str) -> list[int]:
        """Return every number under one of the size's names, the most likely first."""
        found = (getattr(source, n, None) for n in _NAMES[size] for source in self._sources())
        return list(dict.fromkeys(x for x in map(_number, found) if x))

    def first(self, size: str, default: int) -> int:
        return next(iter(self.all(size)), default)

    def widths(self, size: str) -> list[int]:
        """Return possible widths of a token: those of this size, of the model, of any layer."""
        layers = [width for m in self.module.modules() if (width := _width(m))]
        heads = self.first("heads", 1) * self.first("head_dim", 24)
        return list(dict.fromkeys([*self.all(size), *self.all("width"), *layers, heads]))[:5]

    def first_layer(self) -> nn.Module | None:
        """Return the first submodule with parameters of its own, which sees the inputs first."""
        own = (
            m for m in self.module.modules() if next(m.parameters(recurse=False), None) is not None
        )
        return next(own, None)

    def embedding(self, stem: str) -> nn.Embedding | None:
        """Return the first embedding that has `stem` in its name."""
        tables = self.module.named_modules()
        return next((m for n, m in tables if isinstance(m, nn.Embedding) and stem in n), None)

    @property
    def taken(self) -> set[int]:
        """Sizes that B, T and S must differ from, so that mixing up two axes is detected."""
        kinds = ("heads", "kv_heads", "head_dim", "width")
        return {size for kind in kinds for size in self.all(kind)} | {*self.widths("width")}

    @property
    def reach(self) -> int:
        """The number of tokens that windows, distances and experts need, if at most LONGEST."""
        named = [(n, v) for source in self._sources() for n, v in vars(source).items()]
        numbers = [(n, x) for n, v in named if (x := _number(v))]
        windows = [x + 2 for n, x in numbers if _BEYOND.fullmatch(n)]
        buckets = [_BUCKETS_REACH * x for n, x in numbers if _BUCKETS.fullmatch(n)]
        distances = [x for n, x in numbers if "distance" in n]
        experts = [2 * x for x in self.all("experts")]
        wanted = [*windows, *experts, *([] if distances else buckets)]
        return max((x for x in wanted if x <= LONGEST), default=0)

    def lengths(self, usual: int = 11) -> list[int]:
        """Return lengths to try: primes that are not taken, beyond `reach` if positions allow it.

        A waveform has as many samples as give the usual number of tokens. A limit below the usual
        length is ignored, since the name may mean something else, such as the size of a block.
        """
        if steps := self.of_waveforms:
            return [other_prime(_samples(usual, steps), self.taken)]
        most = min((x for x in self.all("positions") if x <= LONGEST), default=LONGEST)
        first = other_prime(max(self.reach, usual), self.taken)
        # Two positions may be reserved, for example for padding.
        limits = (most, most - 2, most // 2, 5)
        shorter = (other_prime(min(x, first), self.taken, -1) for x in limits)
        return list(dict.fromkeys(x for x in (first, *shorter) if x <= most or most < usual))

    @property
    def of_waveforms(self) -> list[tuple[int, int]]:
        """Return (kernel, stride) of the convolutions that make a token of samples, in order."""
        for source in self._sources():
            made = (getattr(source, name, None) for name in ("conv_kernel", "conv_stride"))
            kernels, strides = (x if isinstance(x, Sequence) else () for x in made)
            if kernels and len(kernels) == len(strides):
                return [*zip(kernels, strides, strict=True)]
        return []

    @property
    def batch_first(self) -> bool:
        """True if the batch is the first axis, which is assumed unless a layer says otherwise."""
        return all(getattr(m, "batch_first", True) for m in self.module.modules())

    def _sources(self) -> Iterator[Any]:
        for module in self.module.modules():
            yield module
            if hasattr(config := getattr(module, "config", None), "__dict__"):
                yield config
                yield from (x for n, x in vars(config).items() if n.endswith("_config") and x)


def _samples(tokens: int, steps: Sequence[tuple[int, int]]) -> int:
    """Return the fewest samples of which convolutions make so many tokens."""
    for kernel, stride in reversed(steps):
        tokens = (tokens - 1) * stride + kernel
    return tokens


def other_prime(start: int, taken: set[int], step: int = 1) -> int:
    """Return the first prime from `start` on, or down from it, that is not taken; at least 2."""
    x = max(start, 2)
    while x > 2 and (x in taken or any(x % d == 0 for d in range(2, int(x**0.5) + 1))):
        x += step
    return x


def _number(value: Any) -> int | None:
    """Return a count of at least 1, or None; for a pair, such as an image's sides, its first."""
    if isinstance(value, Sequence) and value and not isinstance(value, str):
        value = value[0]
    return value if type(value) is int and value > 0 else None


def _width(layer: nn.Module) -> int | None:
    """Return the number of features that a layer takes, or None if unknown."""
    name = next((name for kind, name in _WIDTHS if isinstance(layer, kind)), None)
    width = getattr(layer, name) if name else None
    return width[-1] if isinstance(width, tuple) else width
