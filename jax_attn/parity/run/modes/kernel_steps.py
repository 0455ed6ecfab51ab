"""The steps inside torch's kernels: as a port writes them, or how many roundings they are worth."""

import inspect
import math
import mmap
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch._ops import OpOverload

from jax_attn.parity.run.modes.constants import Kwargs, each, tensors_of

_prims = torch.ops.prims

# Kernels of several steps, which a port writes out and rounds at each step: x * sigmoid(x).
COMPOSED = frozenset(
    """
    celu elu elu_backward gelu gelu_backward glu glu_backward log_sigmoid_forward mish
    mish_backward selu silu silu_backward softplus
    """.split()  # noqa: SIM905
)

_POSITION = 3
"""The number of roundings of a position at which an interpolation reads."""


def _softplus_backward(grad: torch.Tensor, x: torch.Tensor, beta: float, _: float) -> torch.Tensor:
    """Return JAX's derivative of logaddexp(x, 0), which exponentiates a rounded softplus."""
    x = x * beta
    softplus = torch.log1p(torch.exp(-torch.abs(x))) + torch.relu(x)
    return grad * torch.exp(x - softplus)


def _log_sigmoid_backward(grad: torch.Tensor, x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return _softplus_backward(grad, -x, 1.0, 0.0)


def _cdist(x1: torch.Tensor, x2: torch.Tensor, p: float, *_: Any) -> torch.Tensor:
    """Return distances; those of equal rows are exactly 0, where a gradient is a convention."""
    if not _is_written_out(x1, x2, p):
        return NotImplemented
    return torch.linalg.vector_norm(_differences(x1, x2), ord=p, dim=-1)


def _cdist_backward(
    grad: torch.Tensor, x1: torch.Tensor, x2: torch.Tensor, p: float, distances: torch.Tensor
) -> torch.Tensor:
    """Return the gradient of the first rows; 0 from distances of 0, as in torch."""
    if not _is_written_out(x1, x2, p):
        return NotImplemented
    off, norm = _differences(x1, x2), distances.unsqueeze(-1)
    along = off.sign()
    if math.isinf(p):
        along = torch.where(off.abs() == off.abs().amax(-1, keepdim=True), along, 0.0)
    elif p != 1:
        along = along * (off.abs() / torch.where(norm == 0, 1.0, norm)) ** (p - 1)
    return (grad.unsqueeze(-1) * along).sum(-2)


def _is_written_out(x1: torch.Tensor, x2: torch.Tensor, p: float) -> bool:
    """Return whether distances are computed by steps, which take the memory of all differences."""
    return p >= 1 and x1.numel() * x2.shape[-2] <= _MOST_DIFFERENCES


def _differences(x1: torch.Tensor, x2: torch.Tensor) -> torch.Tensor:
    return x1.unsqueeze(-2) - x2.unsqueeze(-3)


_MOST_DIFFERENCES = 2**22

WRITTEN: dict[str, Callable[..., Any]] = {
    "_cdist_forward": _cdist,
    "_cdist_backward": _cdist_backward,
    "softplus_backward": _softplus_backward,
    "log_sigmoid_backward": _log_sigmoid_backward,
}
"""Kernels whose steps in a port differ from torch's decompositions."""


def _unwrapped(func: OpOverload) -> Callable[..., Any]:
    """Return torch's decomposition without its wrappers.

    They promote types, of which there is one here, and import torch's compiler to do so.
    """
    return inspect.unwrap(decomposition_table[func])


def _layer_norm(
    x: torch.Tensor,
    shape: Sequence[int],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the result, the means and the reciprocals of the deviations."""
    x = x.contiguous()
    axes = list(range(x.ndim - len(shape), x.ndim))
    variance, mean = torch.var_mean(x, dim=axes, unbiased=False, keepdim=True)
    scale = torch.rsqrt(variance + eps)
    out = (x - mean) * scale
    out = out if weight is None else out * weight.contiguous()
    return out if bias is None else out + bias.contiguous(), mean, scale


def _layer_norm_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    shape: Sequence[int],
    mean: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    wanted: Sequence[bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of x, weight and bias, if they are wanted."""
    grad, x = (a.to(a.dtype, memory_format=torch.contiguous_format) for a in (grad, x))
    axes = list(range(x.ndim))
    outer, inner = axes[: x.ndim - len(shape)], axes[x.ndim - len(shape) :]
    terms = math.prod(shape)
    x_hat = (x - mean) * scale
    of_x_hat = grad if weight is None else grad * weight
    own, shared = of_x_hat * terms, torch.sum(of_x_hat, inner, True)
    along = x_hat * torch.sum(of_x_hat * x_hat, inner, True)
    moved = own - shared - along

    def over_rows(each: torch.Tensor) -> torch.Tensor:
        return torch.sum(each, outer, False) if outer else each.clone()

    return (
        (scale / terms) * moved if wanted[0] else None,
        over_rows(grad * x_hat) if wanted[1] and weight is not None else None,
        over_rows(grad) if wanted[2] and bias is not None else None,
    )


def _var_mean(
    x: torch.Tensor,
    dim: Any = None,
    unbiased: bool | None = None,
    keepdim: bool = False,
    *,
    correction: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return variances and means, as the primitives of torch's decomposition."""
    if not isinstance(dim, Sequence) or not dim:  # of all axes, in one of several spellings
        known = decomposition_table[torch.ops.aten.var_mean.correction]
        return known(x, dim, unbiased, keepdim, correction=correction)
    axes = sorted(axis % x.ndim for axis in dim)
    lost = float(unbiased is not False) if correction is None else float(correction)

    def kept(reduced: torch.Tensor) -> torch.Tensor:
        for axis in axes if keepdim else ():
            reduced = reduced.unsqueeze(axis)
        return reduced

    variance = kept(_prims.var.default(x, axes, lost))
    total = kept(_prims.sum.default(x, axes))
    return variance, _prims.div.default(total, float(math.prod(x.shape[axis] for axis in axes)))


def _softmax(x: torch.Tensor, dim: int, to_float: bool) -> torch.Tensor:
    if not x.numel():
        return _unwrapped(torch.ops.aten._softmax.default)(x, dim, to_float)
    x = x.contiguous()
    exponentials = torch.exp(x - torch.amax(x, dim, keepdim=True))
    return exponentials / torch.sum(exponentials, dim, keepdim=True)


def _log_softmax(x: torch.Tensor, dim: int, to_float: bool) -> torch.Tensor:
    if not x.numel():
        return _unwrapped(torch.ops.aten._log_softmax.default)(x, dim, to_float)
    x = x.contiguous()
    shifted = x - torch.amax(x, dim, keepdim=True)
    return shifted - torch.log(torch.sum(torch.exp(shifted), dim, keepdim=True))


STEPS: dict[str, Callable[..., Any]] = {
    "_softmax": _softmax,
    "_log_softmax": _log_softmax,
    "var_mean": _var_mean,
    "native_layer_norm": _layer_norm,
    "native_layer_norm_backward": _layer_norm_backward,
    "_softmax_backward_data": _unwrapped(torch.ops.aten._softmax_backward_data.default),
    "_log_softmax_backward_data": _unwrapped(torch.ops.aten._log_softmax_backward_data.default),
}
"""Kernels whose steps are those of torch's decompositions, which take 2 s to import what compiles
them."""


def as_operator(
    func: OpOverload, args: tuple, kwargs: dict[str, Any]
) -> tuple[OpOverload, tuple, dict[str, Any]]:
    """Return an equal operator and its arguments for the primitives that steps here use.

    To run a primitive on a plain tensor, torch imports its compiler.
    """
    if func is _prims.sum.default and not kwargs:
        return torch.ops.aten.sum.dim_IntList, args, {}
    if func is _prims.var.default and type(args[0]) is torch.Tensor and len(args) == 3:
        return torch.ops.aten.var.correction, args[:2], {"correction": args[2], **kwargs}
    return func, args, kwargs


def steps_of(func: OpOverload) -> Callable[..., Any]:
    """Return a function of float64 tensors that computes a kernel step by step."""
    return WRITTEN.get(func.overloadpacket.__name__) or _unwrapped(func)


_CONTIGUOUS = frozenset(("native_layer_norm_backward", "_log_softmax_backward_data"))
"""Kernels with contiguous results, whose steps keep the strides of their arguments."""


def laid_out_by_kernel(name: str, result: Any) -> Any:
    """Return what a kernel's steps give with the kernel's strides, by which torch chooses views."""
    return each(torch.Tensor.contiguous, result) if name in _CONTIGUOUS else result


def hidden_steps(func: OpOverload, args: tuple, kwargs: Kwargs) -> int:
    """Return how many roundings of an input make the kernel's result exact for it.

    A factorization or transform of m by n numbers changes each up to m * n times; as a random walk,
    that errs by sqrt(m * n) roundoffs (Higham and Mary, "A New Approach to Probabilistic Rounding
    Error Analysis", 2019). An interpolation multiplies each by a weight, which errs like a position
    of up to sqrt(m * n). An operator that torch composes of others, which the mode does not see,
    counts as one roundoff.
    """
    if func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
        return 1
    sizes: list[Sequence[int]] = [x.shape for x in tensors_of((args, kwargs))]
    sizes += [x for x in args if isinstance(x, list) and all(type(n) is int for n in x)]
    steps = max([math.prod(size[-2:]) for size in sizes], default=1)
    return steps * (_POSITION**2 if "upsample" in func.overloadpacket.__name__ else 1)


def unwritten_zeros(shape: tuple[int, ...]) -> torch.Tensor:
    """Return float64 zeros that take memory only where written: few rows of a table are.

    The allocator's zeros may lie in huge pages, of which each row takes a whole one.
    """
    size, private = math.prod(shape), getattr(mmap, "MAP_PRIVATE", 0)
    # Shared pages, mmap's default, would take memory when they are read, too.
    flags = {"flags": private | mmap.MAP_ANONYMOUS} if private else {}
    pages = mmap.mmap(-1, 8 * max(size, 1), **flags)
    return torch.frombuffer(pages, dtype=torch.float64)[:size].view(shape)
