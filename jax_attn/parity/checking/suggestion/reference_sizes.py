"""The sizes of a reference that its inputs must fit, or should go beyond: read, not asked for."""

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
_BUCKETS_REACH = 4  # T5's 32 buckets are full at a distance of 128, and others copied that
# Classes of layers, and which attribute is how wide a token is that they take.
_WIDTHS = (
    (nn.Linear, "in_features"),
    (nn.LayerNorm | nn.RMSNorm, "normalized_shape"),
    (nn.BatchNorm1d | nn.BatchNorm2d, "num_features"),
    (nn.GroupNorm, "num_channels"),
    (nn.MultiheadAttention, "embed_dim"),
)
LONGEST = 300
"""Windows and distances beyond this would make every run of a check long: they are not tried."""


@dataclass(frozen=True)
class ReferenceSizes:
    """What the attributes of a module, its parts and their configs say, in that order."""

    module: nn.Module

    def all(self, size: str) -> list[int]:
        """Each number that goes by one of the size's names; the likeliest first."""
        found = (getattr(source, n, None) for n in _NAMES[size] for source in self._sources())
        return list(dict.fromkeys(x for x in map(_number, found) if x))

    def first(self, size: str, default: int) -> int:
        return next(iter(self.all(size)), default)

    def widths(self, size: str) -> list[int]:
        """How wide a token may be: of this size, of the model, of any layer."""
        layers = [width for m in self.module.modules() if (width := _width(m))]
        heads = self.first("heads", 1) * self.first("head_dim", 24)
        return list(dict.fromkeys([*self.all(size), *self.all("width"), *layers, heads]))[:5]

    def first_layer(self) -> nn.Module | None:
        """The first part that has parameters of its own, as the first to see the inputs."""
        own = (
            m for m in self.module.modules() if next(m.parameters(recurse=False), None) is not None
        )
        return next(own, None)

    def embedding(self, stem: str) -> nn.Embedding | None:
        """The first table that has `stem` in its name."""
        tables = self.module.named_modules()
        return next((m for n, m in tables if isinstance(m, nn.Embedding) and stem in n), None)

    @property
    def taken(self) -> set[int]:
        """Sizes that B, T and S must not be: an axis taken for another would go unseen."""
        kinds = ("heads", "kv_heads", "head_dim", "width")
        return {size for kind in kinds for size in self.all(kind)} | {*self.widths("width")}

    @property
    def reach(self) -> int:
        """Tokens that windows, distances and experts ask for, of those that are at most LONGEST."""
        named = [(n, v) for source in self._sources() for n, v in vars(source).items()]
        numbers = [(n, x) for n, v in named if (x := _number(v))]
        windows = [x + 2 for n, x in numbers if _BEYOND.fullmatch(n)]
        buckets = [_BUCKETS_REACH * x for n, x in numbers if _BUCKETS.fullmatch(n)]
        distances = [x for n, x in numbers if "distance" in n]
        experts = [2 * x for x in self.all("experts")]
        wanted = [*windows, *experts, *([] if distances else buckets)]
        return max((x for x in wanted if x <= LONGEST), default=0)

    def lengths(self, usual: int = 11) -> list[int]:
        """Lengths to try: primes that are not taken, beyond the reach if positions hold so many.

        A limit below the usual length may be something else of that name, such as a block's size.
        """
        most = min((x for x in self.all("positions") if x <= LONGEST), default=LONGEST)
        first = _prime(max(self.reach, usual), self.taken, 1)
        # Two positions may be set apart, as for padding.
        shorter = (_prime(min(x, first), self.taken, -1) for x in (most, most - 2, most // 2, 5))
        return list(dict.fromkeys(x for x in (first, *shorter) if x <= most or most < usual))

    @property
    def batch_first(self) -> bool:
        """Whether the batch is the first axis, as it is unless a layer says otherwise."""
        return all(getattr(m, "batch_first", True) for m in self.module.modules())

    def _sources(self) -> Iterator[Any]:
        for module in self.module.modules():
            yield module
            if hasattr(config := getattr(module, "config", None), "__dict__"):
                yield config
                yield from (x for n, x in vars(config).items() if n.endswith("_config") and x)


def other_primes(taken: set[int], start: int, count: int) -> list[int]:
    """The first primes from `start` on that are not taken."""
    primes: list[int] = []
    while len(primes) < count:
        primes.append(_prime(start, taken | set(primes), 1))
    return primes


def _prime(start: int, taken: set[int], step: int) -> int:
    x = max(start, 2)
    while x > 2 and (x in taken or any(x % d == 0 for d in range(2, int(x**0.5) + 1))):
        x += step
    return x


def _number(value: Any) -> int | None:
    """A count of at least 1; of a pair, such as an image's two sides, the first."""
    if isinstance(value, Sequence) and value and not isinstance(value, str):
        value = value[0]
    return value if type(value) is int and value > 0 else None


def _width(layer: nn.Module) -> int | None:
    """How many features a layer takes; None where it does not say."""
    name = next((name for kind, name in _WIDTHS if isinstance(layer, kind)), None)
    width = getattr(layer, name) if name else None
    return width[-1] if isinstance(width, tuple) else width
