"""PyTorch's ways to compute a workload. Builders: (workload, tensors) -> `Program`."""

import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import torch_ref.gqa
from jax_attn.bench.arrays import weights
from jax_attn.bench.programs.program import Program, UnsuitedError, from_design, in_design
from jax_attn.bench.workload import Workload
from jax_attn.transfer import LAYOUTS, as_numpy

Tensors: TypeAlias = dict[str, Tensor]
EAGER = "softmax(QKᵀ)V"


def sdpa_core(workload: Workload, tensors: Tensors, backend: str = "") -> Program:
    """backend: the SDPBackend to insist on; by default torch chooses."""
    query, is_causal = tensors["query"], workload.is_causal
    call = partial(fused_attention, is_causal=is_causal)
    if not backend:
        kernel = sdpa_kernel_name(workload, query, is_causal=is_causal)
        return Program(call, {}, kernel=kernel, writes_scores=kernel.endswith("math"))
    insisting = partial(sdpa_kernel, getattr(SDPBackend, backend))
    with insisting(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            kernel = sdpa_kernel_name(workload, query, is_causal=is_causal)
        except RuntimeError as error:
            messages = [*(str(warning.message) for warning in caught), str(error)]
            # torch adds the place in its own source.
            reasons = (message.partition(" (Triggered internally")[0] for message in messages)
            raise UnsuitedError("; ".join(reasons)) from error

    def insisted(*inputs: Tensor) -> Tensor:
        with insisting():
            return call(*inputs)

    return Program(insisted, {}, kernel=kernel, writes_scores=False)


def flash_attn_core(workload: Workload, tensors: Tensors) -> Program:
    import flash_attn

    query = tensors["query"]
    problems = [
        f"takes {wanted}, got {got}"
        for wanted, got, right in (
            ("a GPU", query.device.type, query.is_cuda),
            ("float16 or bfloat16", workload.dtype, workload.dtype != "float32"),
        )
        if not right
    ]
    if problems:
        raise UnsuitedError("; ".join(problems))
    call = partial(flash_attn.flash_attn_func, causal=workload.is_causal)
    return Program(call, {}, kernel=f"flash-attn {flash_attn.__version__}", writes_scores=False)


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
    """The kernel that torch chooses for these shapes.

    masked: attn_mask or is_causal, as torch's fused attention takes them.
    """
    query = like.new_empty(w.B, w.N, 1, w.H).expand(-1, -1, w.T, -1)
    key = like.new_empty(w.B, w.K, 1, w.H).expand(-1, -1, w.S, -1)
    options = {"enable_gqa": w.K != w.N} | masked
    chosen = SDPBackend(torch._fused_sdp_choice(query, key, key, **options))
    return f"SDPA {chosen.name.lower().replace('_attention', '').replace('_', ' ')}"


class _Fused(torch_ref.gqa.GroupedQueryAttention):
    """The `gqa` design's projections around torch's fused attention."""

    # A layer on one input: the design's other arguments would not be timed.
    def forward(self, x: Tensor, is_causal: bool) -> Tensor:  # type: ignore[override]
        heads = (-1, self.head_dim)
        q_BTNH, k_BSKH, v_BSKH = (
            project(x).unflatten(-1, heads) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        heads_BTNH = fused_attention(q_BTNH, k_BSKH, v_BSKH, is_causal=is_causal)
        return self.out_proj(heads_BTNH.flatten(2))


def sdpa_layer(workload: Workload, tensors: Tensors) -> Program:
    w = workload
    module = _loaded(_Fused(w.D, w.N, w.K, head_dim=w.H), "gqa", w, tensors)
    kernel = sdpa_kernel_name(w, tensors["x"], is_causal=w.is_causal)
    call = partial(module, is_causal=w.is_causal)
    return _program(call, module, "gqa", w, kernel, writes_scores=kernel.endswith("math"))


def eager_core(workload: Workload, tensors: Tensors) -> Program:
    device = tensors["query"].device
    call = partial(softmax, future=future(workload, device) if workload.is_causal else None)
    return Program(call, {}, kernel=EAGER)


def future(workload: Workload, device: torch.device | None = None) -> Tensor:
    """(T, S): the keys that causality hides from each query."""
    return torch.ones(workload.T, workload.S, dtype=torch.bool, device=device).triu_(1)


def softmax(query: Tensor, key: Tensor, value: Tensor, *, future: Tensor | None) -> Tensor:
    """As published: scores, a mask of -inf, softmax, product."""
    groups = query.shape[2] // key.shape[2]
    q_BNTH = query.transpose(1, 2)
    k_BNSH, v_BNSH = (x.transpose(1, 2).repeat_interleave(groups, 1) for x in (key, value))
    scores = torch.matmul(q_BNTH, k_BNSH.transpose(-1, -2)) / math.sqrt(query.shape[-1])
    if future is not None:
        scores = scores.masked_fill(future, float("-inf"))
    return torch.matmul(F.softmax(scores, dim=-1), v_BNSH).transpose(1, 2)


def eager_layer(workload: Workload, tensors: Tensors) -> Program:
    module, masks, published = published_layer(workload, tensors)
    return _program(partial(module, **masks), module, published, workload, published)


def published_layer(
    workload: Workload, tensors: Tensors
) -> tuple[torch.nn.Module, dict[str, Tensor], str]:
    """The published module, its masks by argument, and its design's name.

    Multi-head, multi-query or, if the published code has neither, grouped-query.
    """
    w = workload
    published = {w.N: "masked_mha", 1: "mqa"}.get(w.K, "gqa")
    if w.H * w.N != w.D:
        published = "gqa"
    sizes = (w.D, w.N, w.K) if published == "gqa" else (w.D, w.N)
    options = {"head_dim": w.H} if published == "gqa" else {}
    module = _loaded(torch_ref.DESIGNS[published](*sizes, **options), published, w, tensors)
    masks = {}
    if w.is_causal:
        visible = torch.ones(w.T, w.S, dtype=torch.bool, device=tensors["x"].device).tril()
        masks = {"mask": visible if published == "gqa" else visible.int()}
    return module, masks, published


def torch_mha_layer(workload: Workload, tensors: Tensors) -> Program:
    w = workload
    if (w.K, w.N * w.H) != (w.N, w.D):
        raise UnsuitedError("nn.MultiheadAttention has as many key/value heads as query heads")
    published = torch.nn.MultiheadAttention(w.D, w.N, batch_first=True)
    module = _loaded(published, "torch_mha", w, tensors)
    options: dict[str, Any] = {"need_weights": False}
    if w.is_causal:
        options |= {"attn_mask": future(w, tensors["x"].device), "is_causal": True}

    def call(x: Tensor) -> Tensor:
        return module(x, x, x, **options)[0]

    return _program(call, module, "torch_mha", w, "fast path, SDPA with gradients")


def compiled_core(workload: Workload, tensors: Tensors) -> Program:
    eager = eager_core(workload, tensors)
    return Program(_compiled(eager.call), {}, kernel="inductor", compiled=True)


def compiled_layer(workload: Workload, tensors: Tensors) -> Program:
    eager = eager_layer(workload, tensors)
    call = _compiled(eager.call)
    return Program(call, eager.weights, eager.canonical, kernel="inductor", compiled=True)


def _compiled(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    torch._dynamo.reset()  # programs of earlier workloads would count as recompilations
    return torch.compile(call, fullgraph=True, dynamic=False)


def product(a: Tensor, b: Tensor) -> Tensor:
    return a @ b


def _loaded(
    module: torch.nn.Module, design: str, workload: Workload, tensors: Tensors
) -> torch.nn.Module:
    """The module with the workload's weights, in evaluation mode, on the inputs' device."""
    arrays = {name: as_numpy(t) for name, t in weights(tensors).items()}
    x = tensors["x"]
    state = in_design(workload, LAYOUTS[design], arrays)
    module.to(x.device, x.dtype).eval()
    module.load_state_dict({name: tensor(a) for name, a in state.items()})
    return module


def tensor(array: np.ndarray) -> Tensor:
    """A copy in the array's own dtype; bfloat16, which NumPy lacks, goes through float32."""
    wide = array.astype(np.float32) if array.dtype.name == "bfloat16" else array.copy()
    return torch.from_numpy(wide).to(getattr(torch, array.dtype.name))


def _program(
    call: Callable[..., Tensor],
    module: torch.nn.Module,
    design: str,
    workload: Workload,
    kernel: str,
    writes_scores: bool = True,
) -> Program:
    back = partial(from_design, workload, LAYOUTS[design])
    parameters = dict(module.named_parameters())
    return Program(call, parameters, back, kernel=kernel, writes_scores=writes_scores)
