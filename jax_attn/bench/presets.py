"""The named workloads, and the presets that group them."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from jax_attn.bench.workload import CACHED, MODES, Workload


def _layer(
    name: str, B: int, L: int, D: int, N: int, K: int = 0, H: int = 0, **options: Any
) -> Workload:
    return Workload(name, True, B, L, L, N, K or N, H or D // N, D, **options)


def _cached(name: str, T: int, S: int, room: int, B: int = 1, K: int = 16) -> Workload:
    """Return a workload that reads T tokens per row into a cache, which then holds S."""
    return Workload(name, False, B, T, S, 16, K, 64, is_causal=True, room=room)


def _alone(
    preset: str, *lengths: int, N: int = 8, H: int = 64, tokens: int = 0
) -> tuple[Workload, ...]:
    """Return full and causal attention at every length, adjacent because their times are compared.

    tokens: the number in all rows of the batch together; by default the batch has one row.
    """
    return tuple(
        Workload(f"{preset}/{L}{end}", False, tokens // L or 1, L, L, N, N, H, is_causal=bool(end))
        for L in lengths
        for end in ("", "/causal")
    )


def _causal(name: str, D: int, N: int, **heads: int) -> Workload:
    return _layer(name, 1, 1024, D, N, is_causal=True, **heads)


_SEEDS = tuple(
    _layer(f"seeds/{B}x{L}x{D}", B, L, D, 8)
    for B, L, D in ((2, 5, 64), (32, 10, 64), (2, 10, 512), (1, 10, 512))
)
_LAYERS = tuple(
    _layer(f"layers/{B}x{L}x{D}", B, L, D, 8) for B, L, D in ((8, 512, 512), (2, 2048, 512))
)
_BERT = tuple(_layer(f"bert/{L}", 8, L, 768, 12) for L in (128, 512))
_LONG = _alone("long", 2048, 4096, 8192)

# 8,192 tokens in batches of 1 and 8, multi-head and multi-query; and 512 tokens in a small and in a
# large cache, which must not cost more.
_DECODE = (
    *(
        _cached(f"decode/{B}x8192{end}", 1, 8192, 8192, B, K)
        for B in (1, 8)
        for end, K in (("", 16), ("/mqa", 1))
    ),
    *(_cached(f"decode/512of{room}", 1, 512, room) for room in (512, 32768)),
)
_PREFILL = (
    _cached("prefill/2048", 2048, 2048, 8192),
    _cached("prefill/2048/mqa", 2048, 2048, 8192, K=1),
    _cached("prefill/7680+512", 512, 8192, 8192),
)

# Layers are named batch x length x embed_dim, the others by their length.
PRESETS: Mapping[str, tuple[Workload, ...]] = {
    "quick": (_BERT[0], _alone("long", 1024)[0]),
    "seeds": _SEEDS,
    "layers": _LAYERS,
    "bert": _BERT,  # BERT-base
    "gpt2": (_causal("gpt2/1024", 768, 12),),
    "llama": (_causal("llama/1024", 2048, 32, K=8, H=64),),  # Llama-3.2-1B
    "mqa": (_causal("mqa/1024", 2048, 16, K=1, H=128),),  # santacoder
    "long": _LONG,
    "longest": _alone("longest", 16384, 32768),
    "prefill": _PREFILL,
    "decode": _DECODE,
    # 16,384 tokens at every length, as the papers on FlashAttention measure.
    "gpu": _alone("gpu", 2048, 8192, 16384, N=16, H=128, tokens=16384),
    "gpu-64": _alone("gpu-64", 2048, 8192, 16384, N=32, H=64, tokens=16384),
    "gpu-decode": tuple(
        _cached(f"gpu-decode/{S}{end}", 1, S, S, K=K)
        for S in (8192, 32768, 131072)
        for end, K in (("", 16), ("/mqa", 1))
    ),
    "targets": (*_SEEDS, *_LAYERS, *_LONG),
}
# mode → the preset that is measured by default.
PRESET_OF = dict.fromkeys(MODES, "quick") | {mode: mode for mode in CACHED}


def selectable() -> dict[str, tuple[Workload, ...]]:
    """Return every preset and each of their workloads, by name."""
    return {w.name: (w,) for preset in PRESETS.values() for w in preset} | dict(PRESETS)


def select(names: Iterable[str], dtype: str = "float32") -> tuple[Workload, ...]:
    """Return the workloads of these names or presets, in `dtype`, each once, in order."""
    known = selectable()
    workloads = dict.fromkeys(workload for name in names for workload in known[name])
    return tuple(replace(workload, dtype=dtype) for workload in workloads)
