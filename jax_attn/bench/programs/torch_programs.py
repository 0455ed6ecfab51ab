"""Implementations of a workload in PyTorch. Builders: (workload, tensors) -> `TimedProgram`."""

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import torch_ref.gqa
from jax_attn.bench.arrays import weights
from jax_attn.bench.programs.program import TimedProgram, UnsuitedError, from_design, in_design
from jax_attn.bench.workload import Workload
from jax_attn.transfer import LAYOUTS, as_numpy
from jax_attn.transfer.arrays import as_torch

Tensors: TypeAlias = dict[str, Tensor]
EAGER = "softmax(QKᵀ)V"


def sdpa_core(workload: Workload, tensors: Tensors, backend: str = "") -> TimedProgram:
    """Build torch's fused attention, by the SDPBackend `backend` or by the one torch chooses."""
    query, is_causal = tensors["query"], workload.is_causal
    call = partial(fused_attention, is_causal=is_causal)
    if not backend:
        kernel = sdpa_kernel_name(workload, query, is_causal=is_causal)
        return TimedProgram(call, {}, kernel=kernel, writes_scores=kernel.endswith("math"))
    insisting = partial(sdpa_kernel, getattr(SDPBackend, backend))
    with insisting(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            kernel = sdpa_kernel_name(workload, query, is_causal=is_causal)
        except RuntimeError as error:
            messages = [*(str(warning.message) for warning in caught), str(error)]
            # Cut off the place in torch's own source, which torch appends.
            reasons = (message.partition(" (Triggered internally")[0] for message in messages)
            raise UnsuitedError("; ".join(reasons)) from error

    def insisted(*inputs: Tensor) -> Tensor:
        with insisting():
            return call(*inputs)

    return TimedProgram(insisted, {}, kernel=kernel, writes_scores=False)


def flash_attn_core(workload: Workload, tensors: Tensors) -> TimedProgram:
    import flash_attn

    query = tensors["query"]
    problems = [] if query.is_cuda else [f"takes a GPU, got {query.device.type}"]
    problems += ["takes float16 or bfloat16, got float32"] * (workload.dtype == "float32")
    if problems:
        raise UnsuitedError("; ".join(problems))
    call = partial(flash_attn.flash_attn_func, causal=workload.is_causal)
    return TimedProgram(
        call, {}, kernel=f"flash-attn {flash_attn.__version__}", writes_scores=False
    )


def fused_attention(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> Tensor:
    attended = F.scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        is_causal=is_causal,
        enable_gqa=key.shape[2] != query.shape[2],
    )
    return attended.transpose(1, 2)


def sdpa_kernel_name(w: Workload, like: Tensor, **masked: Any) -> str:
    """Return the name of the kernel that torch chooses for these shapes.

    masked: attn_mask or is_causal, as torch's fused attention takes them.
    """
    query = like.new_empty(w.B, w.N, 1, w.H).expand(-1, -1, w.T, -1)
    key = like.new_empty(w.B, w.K, 1, w.H).expand(-1, -1, w.S, -1)
    options = {"enable_gqa": w.K != w.N} | masked
    chosen = SDPBackend(torch._fused_sdp_choice(query, key, key, **options))
    return f"SDPA {chosen.name.lower().replace('_attention', '').replace('_', ' ')}"


class _Fused(torch_ref.gqa.GroupedQueryAttention):
    """The `gqa` design's projections around torch's fused attention."""

    # Takes only one input, because the design's other arguments would not be timed.
    def forward(self, x: Tensor, is_causal: bool) -> Tensor:  # type: ignore[override]
        heads = (-1, self.head_dim)
        q_BTNH, k_BSKH, v_BSKH = (
            project(x).unflatten(-1, heads) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        heads_BTNH = fused_attention(q_BTNH, k_BSKH, v_BSKH, is_causal=is_causal)
        return self.out_proj(heads_BTNH.flatten(2))


def sdpa_layer(workload: Workload, tensors: Tensors) -> TimedProgram:
    w = workload
    module = _loaded(_Fused(w.D, w.N, w.K, head_dim=w.H), "gqa", w, tensors)
    kernel = sdpa_kernel_name(w, tensors["x"], is_causal=w.is_causal)
    call = partial(module, is_causal=w.is_causal)
    return _program(call, module, "gqa", w, kernel, writes_scores=kernel.endswith("math"))


def eager_core(workload: Workload, tensors: Tensors) -> TimedProgram:
    future = ~visible(workload, tensors["query"].device) if workload.is_causal else None
    return TimedProgram(partial(softmax, future=future), {}, kernel=EAGER)


def visible(w: Workload, device: torch.device | None = None) -> Tensor:
    """Return the boolean mask (T, S) by which each token sees all up to and including itself."""
    return torch.ones(w.T, w.S, dtype=torch.bool, device=device).tril_(w.filled)


def softmax(query: Tensor, key: Tensor, value: Tensor, *, future: Tensor | None) -> Tensor:
    """Compute attention as published: scores, a mask of -inf, softmax, product.

    query: (B, T, N, H). key, value: (B, S, K, H). future: (T, S), True where masked.
    """
    groups = query.shape[2] // key.shape[2]
    q_BNTH = query.transpose(1, 2)
    k_BNSH, v_BNSH = (x.transpose(1, 2).repeat_interleave(groups, 1) for x in (key, value))
    scores = torch.matmul(q_BNTH, k_BNSH.transpose(-1, -2)) / math.sqrt(query.shape[-1])
    if future is not None:
        scores = scores.masked_fill(future, float("-inf"))
    return torch.matmul(F.softmax(scores, dim=-1), v_BNSH).transpose(1, 2)


def eager_layer(workload: Workload, tensors: Tensors) -> TimedProgram:
    module, masks, published = published_layer(workload, tensors)
    return _program(partial(module, **masks), module, published, workload, published)


def published_layer(
    workload: Workload, tensors: Tensors
) -> tuple[torch.nn.Module, dict[str, Tensor], str]:
    """Return the published module, its masks by argument name, and its design's name.

    The design is multi-head or multi-query or, if neither fits the sizes, grouped-query.
    """
    w = workload
    published = {w.N: "masked_mha", 1: "mqa"}.get(w.K, "gqa")
    if w.H * w.N != w.D:
        published = "gqa"
    sizes = (w.D, w.N, w.K) if published == "gqa" else (w.D, w.N)
    options = {"head_dim": w.H} if published == "gqa" else {}
    module = _loaded(torch_ref.DESIGNS[published](*sizes, **options), published, w, tensors)
    masks = {"mask": visible(w, tensors["x"].device)} if w.is_causal else {}
    if published != "gqa":
        masks = {name: mask.int() for name, mask in masks.items()}
    return module, masks, published


def torch_mha_layer(workload: Workload, tensors: Tensors) -> TimedProgram:
    w = workload
    if (w.K, w.N * w.H) != (w.N, w.D):
        raise UnsuitedError("nn.MultiheadAttention has as many key/value heads as query heads")
    published = torch.nn.MultiheadAttention(w.D, w.N, batch_first=True)
    module = _loaded(published, "torch_mha", w, tensors)
    options: dict[str, Any] = {"need_weights": False}
    if w.is_causal:
        options |= {"attn_mask": ~visible(w, tensors["x"].device), "is_causal": True}

    def call(x: Tensor) -> Tensor:
        return module(x, x, x, **options)[0]

    return _program(call, module, "torch_mha", w, "fast path, SDPA with gradients")


def compiled_core(workload: Workload, tensors: Tensors) -> TimedProgram:
    return _compiled(eager_core(workload, tensors))


def compiled_layer(workload: Workload, tensors: Tensors) -> TimedProgram:
    return _compiled(eager_layer(workload, tensors))


def _compiled(eager: TimedProgram) -> TimedProgram:
    torch._dynamo.reset()  # programs of earlier workloads would count as recompilations
    call = torch.compile(eager.call, fullgraph=True, dynamic=False)
    return replace(eager, call=call, kernel="inductor", compiled=True)


def _loaded(
    module: torch.nn.Module, design: str, workload: Workload, tensors: Tensors
) -> torch.nn.Module:
    """Load the workload's weights; set evaluation mode; move to the inputs' device and dtype."""
    arrays = {name: as_numpy(t) for name, t in weights(tensors).items()}
    x = tensors["x"]
    state = in_design(workload, LAYOUTS[design], arrays)
    module.to(x.device, x.dtype).eval()
    module.load_state_dict({name: as_torch(a.copy()) for name, a in state.items()})
    return module


def _program(
    call: Callable[..., Tensor],
    module: torch.nn.Module,
    design: str,
    workload: Workload,
    kernel: str,
    writes_scores: bool = True,
) -> TimedProgram:
    back = partial(from_design, workload, LAYOUTS[design])
    parameters = dict(module.named_parameters())
    return TimedProgram(call, parameters, back, kernel=kernel, writes_scores=writes_scores)


# --- with a cache ----------------------------------------------------------------------------
#
# Keys and values are laid out as torch's fused attention takes them, (B, K, room, H). A call writes
# its tokens in place after the earlier ones, and attends to a view of the filled part.


def sdpa_cached(workload: Workload, tensors: Tensors) -> TimedProgram:
    w, cache = workload, _Cache(workload, tensors)
    masked = _masked(w, tensors["query"].device)
    kernel = sdpa_kernel_name(w, tensors["query"], **masked)

    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        k_BKSH, v_BKSH = cache.grown(key, value)
        attended = F.scaled_dot_product_attention(
            query.transpose(1, 2), k_BKSH, v_BKSH, enable_gqa=w.K != w.N, **masked
        )
        return attended.transpose(1, 2)

    writes_scores = kernel.endswith("math")
    return TimedProgram(
        call, {}, kernel=kernel, writes_scores=writes_scores, cache_bytes=cache.nbytes
    )


def eager_cached(workload: Workload, tensors: Tensors) -> TimedProgram:
    """Build cached attention as published: scores, a mask of -inf, softmax, product."""
    w, cache = workload, _Cache(workload, tensors)
    seen = visible(w, tensors["query"].device)

    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        k_BKSH, v_BKSH = cache.grown(key, value)
        # The queries of a group are rows of one product, so no key or value is repeated.
        q_BKGTH = query.unflatten(2, (w.K, -1)).permute(0, 2, 3, 1, 4)
        scores_BKGTS = (q_BKGTH.flatten(2, 3) @ k_BKSH.mT).unflatten(2, (-1, w.T))
        scores_BKGTS = scores_BKGTS / math.sqrt(w.H)
        if w.T > 1:
            scores_BKGTS = scores_BKGTS.masked_fill(~seen, float("-inf"))
        weights_BKGTS = F.softmax(scores_BKGTS, dim=-1)
        heads_BKGTH = (weights_BKGTS.flatten(2, 3) @ v_BKSH).unflatten(2, (-1, w.T))
        return heads_BKGTH.permute(0, 3, 1, 2, 4).flatten(2, 3)

    return TimedProgram(call, {}, kernel=EAGER, cache_bytes=cache.nbytes)


class _Cache:
    """Keys and values of earlier tokens, with room for more."""

    def __init__(self, workload: Workload, tensors: Tensors) -> None:
        w = self.workload = workload
        shape = (w.B, w.K, w.room, w.H)
        self.keys, self.values = (tensors["key"].new_zeros(shape) for _ in range(2))
        self.keys[:, :, : w.filled] = tensors["past_key"].transpose(1, 2)
        self.values[:, :, : w.filled] = tensors["past_value"].transpose(1, 2)

    def grown(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write key and value (B, T, K, H); return views (B, K, S, H) of the filled part."""
        w = self.workload
        self.keys[:, :, w.filled : w.S] = key.transpose(1, 2)
        self.values[:, :, w.filled : w.S] = value.transpose(1, 2)
        return self.keys[:, :, : w.S], self.values[:, :, : w.S]

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes


def _masked(w: Workload, device: torch.device) -> dict[str, Any]:
    """Return mask arguments for torch's fused attention, whose causal mask aligns top left."""
    if w.T == 1:
        return {}
    return {"attn_mask": visible(w, device)} if w.filled else {"is_causal": True}
