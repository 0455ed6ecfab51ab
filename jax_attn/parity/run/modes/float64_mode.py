"""A torch mode that computes everything in float64."""

import math
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload

from jax_attn.parity.run.modes.constants import SOFTMAXES, Kwargs, each
from jax_attn.parity.run.modes.decisions import DECIDING, DecisionReplay
from jax_attn.parity.run.modes.fills import SUMS_OF_TWO, Summands, as_kept
from jax_attn.parity.run.modes.mode import Mode
from jax_attn.parity.run.modes.products import GROUPED, grouped_product

TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}

# Operations that move or choose values and round none.
_EXACT = frozenset(
    """
    abs alias amax amin aminmax arange argmax argmin as_strided bernoulli bucketize cat ceil chunk
    clamp clone constant_pad_nd contiguous copy copy_ cummax cummin detach diagonal embedding empty
    empty_like empty_strided expand fill fill_ flip floor fmax fmin full full_like gather
    _grouped_mm histc index index_put_ index_select isnan isneginf kthvalue lift_fresh masked_fill
    masked_fill_ max maximum median min minimum mode nan_to_num nanmedian narrow native_dropout neg
    neg_ new_empty new_empty_strided new_full new_ones new_zeros nonzero ones ones_like permute
    reflection_pad1d relu relu_ repeat reshape roll round scatter scatter_ searchsorted select
    select_backward select_scatter sign slice slice_backward slice_scatter sort split
    split_with_sizes squeeze stack t threshold_backward _to_copy topk transpose tril triu trunc
    unbind unfold _unsafe_view unsqueeze upsample_nearest1d upsample_nearest2d upsample_nearest3d
    _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d view where zero_
    zeros zeros_like
    """.split()  # noqa: SIM905
)

# In-place operators with extra steps around their kernel: compute the result, then write it.
_IN_PLACE = frozenset(f"{name}_" for name in (*SUMS_OF_TWO, *DECIDING))


@cache
def rounds(func: OpOverload) -> bool:
    """Return whether an operator's results are rounded, rather than moved or chosen."""
    name = func.overloadpacket.__name__
    return not (name in _EXACT or name.removesuffix("_") in _EXACT or func.is_view)


def chooses(func: OpOverload, args: tuple, kwargs: Kwargs) -> bool:
    """Return whether a call chooses one of its numbers, as others of its operator do not.

    Its derivative compares the result with each number, so the result must be one of them.
    """
    name = func.overloadpacket.__name__.removesuffix("_")
    if name not in _CHOOSING:
        return False
    place, key, choices = _CHOOSING[name]
    return kwargs.get(key, args[place] if len(args) > place else None) in choices


_MOST = ("amax", "amin")
_CHOOSING: dict[str, tuple[int, str, tuple[Any, ...]]] = {
    "scatter_reduce": (4, "reduce", _MOST),
    "index_reduce": (4, "reduce", _MOST),
    "segment_reduce": (1, "reduce", ("max", "min")),
    "linalg_vector_norm": (1, "ord", (math.inf, -math.inf)),
}
"""Operator -> the place and name of an argument, and its values for which a call chooses."""


@cache
def is_view(func: OpOverload) -> bool:
    """Return whether an operator's result is a view of its first argument; most results are."""
    return func.is_view


@cache
def not_in_place(func: OpOverload) -> OpOverload:
    """Return the out-of-place form of `func`, which writes to its first argument."""
    packet = getattr(torch.ops.aten, func.overloadpacket.__name__.removesuffix("_"))
    return getattr(packet, func._overloadname)


def _widen(tree: Any) -> Any:
    """Return `tree` with floating tensors as float64 and complex ones as complex128."""
    return each(_widened, tree)


def _widened(x: torch.Tensor) -> torch.Tensor:
    if x.dtype is torch.float64:
        return x
    return x.to(torch.complex128 if x.is_complex() else torch.float64)


class Float64(Mode):
    """Float64 throughout: below autograd, every cast to a narrower type gives float64 instead.

    Many models cast to float32 inside (norms, rotary tables, softmax), so with `.double()` only, an
    error of 1e-7 remains that would be taken for the port's.

    dtype: the one under test, in which sums with a mask's fill are computed (`run.modes.fills`).
    replay: the reference's decisions in `dtype`, which this run follows (`run.modes.decisions`).
    """

    dtype = torch.float32
    replay: DecisionReplay | None = None
    largest = 0
    """The number of elements of the largest result so far."""

    def run_on(self, module: torch.nn.Module) -> None:
        """Prepare for a run of this copy of the reference."""

    def dispatched(self, func: OpOverload, args: tuple, kwargs: Kwargs) -> Any:
        if is_view(func) and args[0].dtype is torch.float64:
            return func(*args, **kwargs)
        options = dict(kwargs)
        dtype = options.get("dtype")
        if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
            options["dtype"] = torch.float64
        if not func._schema.is_mutable:
            return self.compute(func, *_widen((args, options)))
        if func.overloadpacket.__name__ in _IN_PLACE:
            return args[0].copy_(self.compute(not_in_place(func), *_widen((args, options))))
        return func(*args, **options)  # its dtype is that of what it writes to

    def call(self, func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Return the operator's own result."""
        return func(*args, **kwargs)

    def compute(self, func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Return the operator's result; its floating arguments are already float64."""
        if func.overloadpacket.__name__ == GROUPED and args[0].ndim == 2:
            a, b, *ends = args
            return grouped_product(self.compute, a, b, ends[0] if ends else kwargs["offs"])
        result = _widen(self.call(func, args, kwargs))
        if isinstance(result, torch.Tensor):
            self.largest = max(self.largest, result.numel())
        if self.replay:
            result = self.replay.result(func, args, kwargs, result)
        name = func.overloadpacket.__name__
        if name in SUMS_OF_TWO and result.is_floating_point():
            return as_kept(result, Summands.of(name, args, kwargs), self.dtype)
        return result


class Unperturbed(Float64):
    """The centre of a spread: float64 in which the softmax of a row that is all -inf gives 0.

    This follows the definition. torch's own softmax gives NaN, and NaN would spoil the spread of
    every other row.

    met_empty_rows: whether a softmax had such a row; if none had, the numbers are `Float64`'s.
    """

    met_empty_rows = False

    def compute(self, func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
        if func.overloadpacket.__name__ in SOFTMAXES:
            return self._softmax(func, *args, **kwargs)
        return super().compute(func, args, kwargs)

    def _softmax(
        self, func: OpOverload, scores: torch.Tensor, dim: int, *others: Any, **options: Any
    ) -> torch.Tensor:
        empty = torch.isneginf(scores).all(dim=dim, keepdim=True)
        self.met_empty_rows = self.met_empty_rows or bool(empty.any())
        args = (scores.masked_fill(empty, 0.0), dim, *others)
        return self._weights(func, args, options).masked_fill(empty, 0.0)

    def _weights(self, func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> torch.Tensor:
        """Return the softmax of scores without an empty row."""
        return func(*args, **kwargs)
