"""The table of designs: how each is built and called on both sides, transferred, and defined.

Only this module knows both a published design's torch class and its Flax port. A variant
("torch_mha/kdim_vdim") has its own row under the design's name.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from flax import nnx

import torch_ref
from jax_attn.attention import rotary
from jax_attn.selfcheck.matrix import cached_calls, calls
from jax_attn.selfcheck.matrix.cases import Size
from jax_attn.selfcheck.matrix.masks import DROPPED
from jax_attn.selfcheck.matrix.ports import EmbeddedAttention, PortBuilder
from jax_attn.selfcheck.oracle import HeadNorm, Turn
from jax_attn.transfer import LAYOUTS, PLAIN_PIPELINE, Layout
from torch_ref import plain_mha, torch_mha
from torch_ref import rotary as torch_rotary


@dataclass(frozen=True)
class Design:
    """A published design, its port, and the oracle's definition of it.

    reference: size -> torch module. port: (size, dtype, rngs) -> NNX module.
    layout: their transfer table.
    reference_call, port_call: mask kind -> `call(module, **inputs)`.
    weights: oracle name -> torch key, or (torch key, which third of its rows).
    inputs: the names of the float inputs, or of the token ids; a single one means self-attention.
    options: the constructors' arguments besides sizes; the oracle uses those that are fields of
        `AttentionProblem`.
    heads_average: the returned weights are averaged over the heads.
    nan_rows: in the published design, a row that may attend to nothing is NaN; the port gives 0.
    cached: the port reads the text in pieces, through a cache.
    """

    reference: Callable[[Size], torch.nn.Module]
    port: Callable[..., nnx.Module]
    layout: Layout
    reference_call: Callable[[str], Callable]
    port_call: Callable[[str], Callable]
    weights: Mapping[str, Any]
    inputs: tuple[str, ...] = ("x",)
    options: Mapping[str, Any] = field(default_factory=dict)
    heads_average: bool = False
    nan_rows: bool = False
    cached: bool = False

    @property
    def extra_columns(self) -> int:
        """The number of extra keys that have a column of weights."""
        return sum(self.options.get(name, False) for name in ("add_bias_kv", "add_zero_attn"))

    def key_heads(self, size: Size) -> int:
        """Return K, the number of key/value heads."""
        return self.port.kv_heads(size) if isinstance(self.port, PortBuilder) else size.N


# --- the oracle's names for torch's weights -----------------------------------------------------


def _split(q: str, k: str, v: str, o: str) -> dict[str, str]:
    names = dict(zip("qkvo", (q, k, v, o), strict=True))
    return {
        f"{p}.{part}": f"{key}.{part}" for p, key in names.items() for part in ("weight", "bias")
    }


_OUT = {"o.weight": "out_proj.weight", "o.bias": "out_proj.bias"}
_FUSED = _OUT | {
    f"{p}.{part}": (f"qkv_proj.{part}", i)
    for i, p in enumerate("qkv")
    for part in ("weight", "bias")
}
_EXTRA = {name: name for name in ("bias_k", "bias_v", "sinks")}
_PACKED_BIAS = _OUT | _EXTRA | {f"{p}.bias": ("in_proj_bias", i) for i, p in enumerate("qkv")}
_PACKED = _PACKED_BIAS | {f"{p}.weight": ("in_proj_weight", i) for i, p in enumerate("qkv")}
_PACKED_APART = _PACKED_BIAS | {f"{p}.weight": f"{p}_proj_weight" for p in "qkv"}
_QKV_PROJ = (
    _split("q_proj", "k_proj", "v_proj", "out_proj")
    | _EXTRA
    | {f"{p}_norm.{part}": f"{p}_norm.{part}" for p in "qk" for part in ("weight", "bias")}
)

# --- the table ------------------------------------------------------------------------------------

_CROSS = ("query", "key", "value")
VOCABULARY = 1 + len(plain_mha.WORD_TO_INDEX)
# Wider than embed_dim by different amounts, so that no width can be mistaken for another.
_KDIM, _VDIM = 3, 5
_HEAD_DIM, _SCALE, _SOFTCAP = 9, 0.21, 1.7
# A small base, so that all pairs rotate within a few steps. A fully rotated head has even size.
_BASE, _EVEN, _PARTIAL, _EPSILON = 20.0, 10, 4, 1e-5


def _published(name: str, call: Callable[[str], Callable], weights: Mapping[str, Any]) -> Design:
    """Return a published self-attention design and its port. call: the reference's."""
    return Design(
        reference=lambda s: torch_ref.DESIGNS[name](s.D, s.N),
        port=PortBuilder(),
        layout=LAYOUTS[name],
        reference_call=call,
        port_call=calls.port(),
        weights=weights,
    )


_WEIGHTS = replace(
    _published("weights_mha", calls.zero_one_3d, _split("w_q", "w_k", "w_v", "w_o")),
    port=PortBuilder(out_dropout_rate=0.1),
    port_call=calls.port(weights="each head"),
    nan_rows=True,
)
_OF_FOUR = _split("W_Q", "W_K", "W_V", "W_O")
_MASKED = replace(_published("masked_mha", calls.zero_one_4d, _OF_FOUR), nan_rows=True)
_MQA = replace(
    _published("mqa", calls.zero_one_4d, _OF_FOUR), port=PortBuilder(lambda s: 1), nan_rows=True
)
_PLAIN = _published("plain_mha", calls.bare, _split("query", "key", "value", "out"))
_TORCH = Design(
    reference=lambda s: torch_mha.MultiheadAttention(s.D, s.N, batch_first=True),
    port=PortBuilder(),
    layout=LAYOUTS["torch_mha"],
    reference_call=calls.torch_mha(),
    port_call=calls.port(),
    weights=_PACKED,
    inputs=_CROSS,
)
_GROUPED = Design(
    reference=lambda s: torch_ref.DESIGNS["gqa"](s.D, s.N, s.K),
    port=PortBuilder(lambda s: s.K),
    layout=LAYOUTS["gqa"],
    reference_call=calls.gqa,
    port_call=calls.port(weights="each head"),
    weights=_QKV_PROJ,
    inputs=_CROSS,
)


def _grouped(options: Mapping[str, Any], torch_options: Mapping[str, Any], **oracle: Any) -> Design:
    """Return a grouped design with other options, by the port's, torch's and the oracle's names."""

    def reference(s: Size) -> torch.nn.Module:
        options = {k: v(s) if callable(v) else v for k, v in torch_options.items()}
        return torch_ref.DESIGNS["gqa"](s.D, s.N, s.K, **options)

    return replace(
        _GROUPED, reference=reference, port=PortBuilder(lambda s: s.K, **options), options=oracle
    )


def _cached(design: Design, reference_call: Callable[[str], Callable] | None = None) -> Design:
    """Return a design whose port reads a text in pieces; by default the reference does not."""
    return replace(
        design,
        inputs=("x",),
        reference_call=reference_call or design.reference_call,
        port_call=cached_calls.port_pieces,
        cached=True,
    )


def _normalised(norm: Callable, torch_norm: Callable, *, centred: bool) -> Design:
    """Return a grouped design with a norm on queries and keys, then rotary positions; no biases."""
    turned, torch_turned = (room.Rotary(_BASE, _PARTIAL) for room in (rotary, torch_rotary))
    return _grouped(
        {"qk_norm": lambda size: norm, "rotary": turned, "use_bias": False},
        {"qk_norm": lambda size: torch_norm, "rotary": torch_turned, "bias": False},
        after=(HeadNorm(_EPSILON, centred), Turn(_BASE, _PARTIAL)),
    )


def _output_alone(bind: Callable[[str], Callable]) -> Callable[[str], Callable]:
    """Convert a call (module, x, **masks) to one that returns only the output, not the weights."""
    return lambda kind: lambda module, **inputs: {"output": bind(kind)(module, **inputs)["output"]}


def _of_itself(bind: Callable[[str], Callable]) -> Callable[[str], Callable]:
    """Convert a call (module, query, key, value) to one with only x."""
    return lambda kind: lambda module, x: bind(kind)(module, x, x, x)


def _wider(by: int) -> Callable[[Size], int]:
    return lambda size: size.D + by


_ROTARY = _grouped(
    {"rotary": rotary.Rotary(_BASE), "head_dim": _EVEN},
    {"rotary": torch_rotary.Rotary(_BASE), "head_dim": _EVEN},
    after=(Turn(_BASE, _EVEN),),
)
_PIECES = _cached(_GROUPED, cached_calls.torch_pieces)
# Extra keys, which every query sees in addition to the sequence's own: learned, zero, sinks.
_BIAS_KV_ZERO: dict[str, Any] = {"add_bias_kv": True, "add_zero_attn": True}
_ALL_EXTRA = _BIAS_KV_ZERO | {"sinks": True}
_TORCH_EXTRA = replace(
    _TORCH,
    reference=lambda s: torch_mha.MultiheadAttention(s.D, s.N, batch_first=True, **_BIAS_KV_ZERO),
    port=PortBuilder(**_BIAS_KV_ZERO),
    options=_BIAS_KV_ZERO,
)
_DIMS = {"kdim": _wider(_KDIM), "vdim": _wider(_VDIM)}

PORTED_DESIGNS: dict[str, Design] = {
    "weights_mha": _WEIGHTS,
    "fused_mha": _published("fused_mha", calls.bare, _FUSED),
    "masked_mha": _MASKED,
    "mqa": _MQA,
    "plain_mha": _PLAIN,
    "plain_mha/pipeline": replace(
        _PLAIN,
        reference=lambda s: plain_mha.SentenceAttention(VOCABULARY, s.D, s.N),
        port=lambda s, dtype, rngs, **more: EmbeddedAttention(
            VOCABULARY, s.D, s.N, dtype=dtype, param_dtype=dtype, rngs=rngs, **more
        ),
        layout=PLAIN_PIPELINE,
        weights={k: f"attention.{v}" for k, v in _PLAIN.weights.items()},
        inputs=("tokens",),
        reference_call=lambda kind: lambda module, tokens: {"output": module(tokens)},
        port_call=lambda kind: lambda module, tokens: {"output": module(tokens)},
    ),
    "torch_mha": _TORCH,
    "torch_mha/sequence_first": replace(
        _TORCH,
        reference=lambda s: torch_mha.MultiheadAttention(s.D, s.N),
        reference_call=calls.torch_mha(sequence_first=True),
    ),
    "torch_mha/no_bias": replace(
        _TORCH,
        reference=lambda s: torch_mha.MultiheadAttention(s.D, s.N, bias=False, batch_first=True),
        port=PortBuilder(use_bias=False),
    ),
    "torch_mha/kdim_vdim": replace(
        _TORCH,
        reference=lambda s: torch_mha.MultiheadAttention(
            s.D, s.N, kdim=s.D + _KDIM, vdim=s.D + _VDIM, batch_first=True
        ),
        port=PortBuilder(**_DIMS),
        weights=_PACKED_APART,
        options={"kdim": _KDIM, "vdim": _VDIM},
    ),
    "torch_mha/weights": replace(
        _TORCH,
        reference_call=calls.torch_mha(weights="each head"),
        port_call=calls.port(weights="each head"),
        nan_rows=True,
    ),
    "torch_mha/mean_weights": replace(
        _TORCH,
        reference_call=calls.torch_mha(weights="mean"),
        port_call=calls.port(weights="mean"),
        heads_average=True,
    ),
    "gqa": _GROUPED,
    # Without biases, as with norms and sinks: a key bias's gradient would be mostly rounding, since
    # only the softcap, the norm or the sinks make it other than zero.
    "gqa/softcap": _grouped(
        {"softcap": _SOFTCAP, "use_bias": False},
        {"softcap": _SOFTCAP, "bias": False},
        softcap=_SOFTCAP,
    ),
    "gqa/no_bias": _grouped({"use_bias": False}, {"bias": False}),
    "gqa/kdim_vdim": _grouped(_DIMS, _DIMS, kdim=_KDIM, vdim=_VDIM),
    "gqa/head_dim_scale": _grouped(
        {"head_dim": _HEAD_DIM, "scale": _SCALE, "use_out_bias": False},
        {"head_dim": _HEAD_DIM, "scale": _SCALE, "out_bias": False},
        scale=_SCALE,
    ),
    "gqa/rotary": _ROTARY,
    "gqa/rotary_interleaved_partial": _grouped(
        {"rotary": rotary.Rotary(_BASE, _PARTIAL, interleaved=True)},
        {"rotary": torch_rotary.Rotary(_BASE, _PARTIAL, interleaved=True)},
        after=(Turn(_BASE, _PARTIAL, interleaved=True),),
    ),
    "gqa/qk_norm": _normalised(
        partial(nnx.RMSNorm, epsilon=_EPSILON),
        partial(torch.nn.RMSNorm, eps=_EPSILON),
        centred=False,
    ),
    "gqa/qk_layer_norm": _normalised(
        partial(nnx.LayerNorm, epsilon=_EPSILON, use_fast_variance=False),
        partial(torch.nn.LayerNorm, eps=_EPSILON),
        centred=True,
    ),
    "gqa/dropout": replace(
        _grouped({"dropout_rate": DROPPED}, {"dropout": DROPPED}),
        reference_call=calls.gqa_dropping,
        port_call=calls.port_dropping,
    ),
    "torch_mha/extra_keys": _TORCH_EXTRA,
    "torch_mha/extra_keys_weights": replace(
        _TORCH_EXTRA,
        reference_call=calls.torch_mha(weights="each head"),
        port_call=calls.port(weights="each head"),
    ),
    "gqa/extra_keys": _grouped(
        _BIAS_KV_ZERO | {"rotary": rotary.Rotary(_BASE, _PARTIAL)},
        _BIAS_KV_ZERO | {"rotary": torch_rotary.Rotary(_BASE, _PARTIAL)},
        after=(Turn(_BASE, _PARTIAL),),
        **_BIAS_KV_ZERO,
    ),
    "gqa/sinks": _grouped({"sinks": True, "use_bias": False}, {"sinks": True, "bias": False}),
    "gqa/extra_keys_dropout": replace(
        _grouped(
            _ALL_EXTRA | {"dropout_rate": DROPPED}, _ALL_EXTRA | {"dropout": DROPPED}, **_ALL_EXTRA
        ),
        reference_call=calls.gqa_dropping,
        port_call=calls.port_dropping,
    ),
    # Both sides through their caches.
    "gqa/cached": _PIECES,
    "gqa/cached_ragged": replace(
        _PIECES, reference_call=cached_calls.torch_ragged, port_call=cached_calls.port_ragged
    ),
    "gqa/cached_rotary": _cached(_ROTARY, cached_calls.torch_pieces),
    "gqa/cached_extra_keys": _cached(
        _grouped(_ALL_EXTRA, _ALL_EXTRA, **_ALL_EXTRA), cached_calls.torch_pieces
    ),
    # The published design has no cache and reads the text at once; the port uses its cache.
    "weights_mha/cached": _cached(_WEIGHTS, _output_alone(calls.zero_one_3d)),
    "masked_mha/cached": _cached(_MASKED),
    "mqa/cached": _cached(_MQA),
    "torch_mha/cached": _cached(_TORCH, _of_itself(calls.torch_mha())),
}
