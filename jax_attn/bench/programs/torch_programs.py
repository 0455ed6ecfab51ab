"""PyTorch's ways to compute a workload. Builders: (workload, tensors) -> `Program`."""

import math
import warnings
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel

import torch_ref
from jax_attn.bench.arrays import weights
from jax_attn.bench.programs.program import Program, UnsuitedError, from_design, in_design
from jax_attn.bench.workload import Workload
from jax_attn.transfer import LAYOUTS, as_numpy

Tensors = dict[str, torch.Tensor]
EAGER = "softmax(QKᵀ)V"


def sdpa_core(workload: Workload, tensors: Tensors, backend: str = "") -> Program:
    """backend: the SDPBackend to insist on; torch's choice unless given."""
    query, is_causal = tensors["query"], workload.is_causal
    call = partial(_sdpa, is_causal=is_causal)
    if not backend:
        kernel = sdpa_kernel_name(workload, query, is_causal=is_causal)
        return Program(call, {}, kernel=kernel, writes_scores=kernel.endswith("math"))
    insisting = partial(sdpa_kernel, getattr(SDPBackend, backend))
    with insisting(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            kernel = sdpa_kernel_name(workload, query, is_causal=is_causal)
        except RuntimeError as error:
            reasons = [*(str(warning.message) for warning in said), str(error)]
            # Where in its own source it warns, torch adds in brackets.
            reasons = (reason.partition(" (Triggered internally")[0] for reason in reasons)
            raise UnsuitedError("; ".join(reasons)) from error

    def insisted(*inputs):
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


def _sdpa(query, key, value, *, is_causal: bool) -> torch.Tensor:
    attended = F.scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        is_causal=is_causal,
        enable_gqa=key.shape[2] != query.shape[2],
    )
    return attended.transpose(1, 2)


def sdpa_kernel_name(w: Workload, like: torch.Tensor, **masked) -> str:
    """Which of its kernels torch chooses for these shapes.

    masked: attn_mask or is_causal, as its fused attention takes them.
    """
    options = {"dtype": like.dtype, "device": like.device}
    query = torch.empty(w.B, w.N, 1, w.H, **options).expand(-1, -1, w.T, -1)
    key = torch.empty(w.B, w.K, 1, w.H, **options).expand(-1, -1, w.S, -1)
    given = {"enable_gqa": w.K != w.N} | masked
    chosen = SDPBackend(torch._fused_sdp_choice(query, key, key, **given))
    return f"SDPA {chosen.name.lower().replace('_attention', '').replace('_', ' ')}"


class _Fused(torch_ref.DESIGNS["gqa"]):
    """The `gqa` design's projections around torch's fused attention."""

    def forward(self, x: torch.Tensor, is_causal: bool) -> torch.Tensor:
        heads = (-1, self.head_dim)
        q_BTNH, k_BSKH, v_BSKH = (
            project(x).unflatten(-1, heads) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.out_proj(_sdpa(q_BTNH, k_BSKH, v_BSKH, is_causal=is_causal).flatten(2))


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


def future(workload: Workload, device: torch.device | None = None) -> torch.Tensor:
    """(T, S): the keys that causality hides from each query."""
    return torch.ones(workload.T, workload.S, dtype=torch.bool, device=device).triu_(1)


def softmax(query, key, value, *, future: torch.Tensor | None) -> torch.Tensor:
    """As published: scores, a mask of -inf, softmax, product."""
    groups = query.shape[2] // key.shape[2]
    q_BNTH = query.transpose(1, 2)
    k_BNSH, v_BNSH = (x.transpose(1, 2).repeat_interleave(groups, 1) for x in (key, value))
    scores = torch.matmul(q_BNTH, k_BNSH.transpose(-1, -2)) / math.sqrt(query.shape[-1])
    if future is not None:
        scores = scores.masked_fill(future, float("-inf"))
    return torch.matmul(F.softmax(scores, dim=-1), v_BNSH).transpose(1, 2)


def eager_layer(workload: Workload, tensors: Tensors) -> Program:
    module, given, published = published_layer(workload, tensors)
    return _program(partial(module, **given), module, published, workload, published)


def published_layer(
    workload: Workload, tensors: Tensors
) -> tuple[torch.nn.Module, dict[str, torch.Tensor], str]:
    """The published module, what it is given besides x, and its design's name.

    Multi-head, multi-query or, where the published code has neither, grouped-query.
    """
    w = workload
    published = {w.N: "masked_mha", 1: "mqa"}.get(w.K, "gqa")
    if w.H * w.N != w.D:
        published = "gqa"
    sizes = (w.D, w.N, w.K) if published == "gqa" else (w.D, w.N)
    options = {"head_dim": w.H} if published == "gqa" else {}
    module = _loaded(torch_ref.DESIGNS[published](*sizes, **options), published, w, tensors)
    given = {}
    if w.is_causal:
        visible = torch.ones(w.T, w.S, dtype=torch.bool, device=tensors["x"].device).tril()
        given = {"mask": visible if published == "gqa" else visible.int()}
    return module, given, published


def torch_mha_layer(workload: Workload, tensors: Tensors) -> Program:
    w = workload
    if (w.K, w.N * w.H) != (w.N, w.D):
        raise UnsuitedError("nn.MultiheadAttention has as many key/value heads as query heads")
    module = torch.nn.MultiheadAttention(w.D, w.N, batch_first=True)
    module = _loaded(module, "torch_mha", w, tensors)
    given = {"need_weights": False}
    if w.is_causal:
        given |= {"attn_mask": future(w, tensors["x"].device), "is_causal": True}

    def call(x: torch.Tensor) -> torch.Tensor:
        return module(x, x, x, **given)[0]

    return _program(call, module, "torch_mha", w, "fast path, SDPA with gradients")


def compiled_core(workload: Workload, tensors: Tensors) -> Program:
    eager = eager_core(workload, tensors)
    return Program(_compiled(eager.call), {}, kernel="inductor", compiled=True)


def compiled_layer(workload: Workload, tensors: Tensors) -> Program:
    eager = eager_layer(workload, tensors)
    call = _compiled(eager.call)
    return Program(call, eager.weights, eager.canonical, kernel="inductor", compiled=True)


def _compiled(call):
    torch._dynamo.reset()  # programs of earlier workloads would count as recompilations
    return torch.compile(call, fullgraph=True, dynamic=False)


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b


def _loaded(module: torch.nn.Module, design: str, workload: Workload, tensors: Tensors):
    """The module with the workload's weights, in evaluation mode, where the inputs are."""
    given = {name: as_numpy(t) for name, t in weights(tensors).items()}
    x = tensors["x"]
    state = in_design(workload, LAYOUTS[design], given)
    module.to(x.device, x.dtype).eval()
    module.load_state_dict({name: tensor(a) for name, a in state.items()})
    return module


def tensor(array: np.ndarray) -> torch.Tensor:
    """A copy in the array's own dtype; bfloat16, which NumPy lacks, exactly by way of float32."""
    wide = array.astype(np.float32) if array.dtype.name == "bfloat16" else array.copy()
    return torch.from_numpy(wide).to(getattr(torch, array.dtype.name))


def _program(call, module, design: str, workload: Workload, kernel: str, writes_scores=True):
    back = partial(from_design, workload, LAYOUTS[design])
    parameters = dict(module.named_parameters())
    return Program(call, parameters, back, kernel=kernel, writes_scores=writes_scores)
