"""The error of a sum, from its terms and whether they are small integers."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch._ops import OpOverload

from jax_attn.parity.judge.budget import Precision, bridge
from jax_attn.parity.run.modes.constants import Kwargs, each
from jax_attn.parity.run.modes.draws import in_parts
from jax_attn.parity.run.modes.many_runs import RunsTensor, first_run

Terms = tuple[torch.Tensor, int]
"""The sum of squared terms, and the number of terms."""
Call = tuple[str, torch.Size, torch.Size]
"""A product's operator and the shapes of its operands."""
_Places = tuple[int, ...]
"""A tensor's size, rows and columns, which do not depend on the shape of its batch."""
_ROOM = 2**29
"""Bytes to keep: enough for a BERT of 109 million parameters at T = 64."""
_SMALLEST = torch.finfo(torch.float32).tiny


def _sum_terms(x: torch.Tensor, dim: Any = None, keepdim: bool = False, **_: Any) -> Terms:
    dims = list(range(x.ndim)) if not dim and dim != 0 else [dim] if isinstance(dim, int) else dim
    squares = x.square().sum(dim=dims, keepdim=keepdim)
    return squares, x.numel() // max(squares.numel(), 1)


def _mean_terms(x: torch.Tensor, dim: Any = None, keepdim: bool = False, **_: Any) -> Terms:
    squares, terms = _sum_terms(x, dim, keepdim)
    return squares / max(terms, 1) ** 2, terms


SUM_TERMS: dict[str, Callable[..., Terms]] = {"sum": _sum_terms, "mean": _mean_terms}
PRODUCTS = {"mm": 0, "bmm": 0, "mv": 0, "dot": 0, "addmm": 1, "baddbmm": 1}
"""Operators that sum products -> the index of the first factor among the arguments."""
SUMS = frozenset((*SUM_TERMS, *PRODUCTS))
_LINEAR = frozenset(
    """
    _index_put_impl _trilinear _upsample_nearest_exact1d_backward _upsample_nearest_exact2d_backward
    _upsample_nearest_exact3d_backward addbmm col2im conv_tbc convolution convolution_backward
    cumsum index_add replication_pad1d_backward replication_pad2d_backward
    replication_pad3d_backward scatter_add trace unfold_backward
    upsample_nearest1d_backward upsample_nearest2d_backward upsample_nearest3d_backward
    """.split()  # noqa: SIM905
)
"""Sums that are linear in each floating argument: applied to squares, they add up the squared
terms; applied to ones, they count them."""
_POOLS = ("avg_pool2d", "avg_pool3d")


_WINDOW = 32


def xla_windows(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return how XLA:CPU sums over axes of these sizes: the number of terms in each window of its
    passes over long axes, and the number of terms of the last sum.

    Source: XLA's tree_reduction_rewriter.cc.
    """
    windows = []
    while max(sizes, default=1) > _WINDOW:
        windows.append(math.prod(min(n, _WINDOW) for n in sizes))
        sizes = [-(-n // _WINDOW) for n in sizes]
    return windows, math.prod(sizes)


def bridge_of(
    name: str, terms: int, args: tuple, precision: Precision, coarse: float
) -> tuple[float, float, float]:
    """Return `bridge`, except for backward sums whose roundoff `coarse` is that of the dtype.

    In a backward pass, JAX sums the gradient of a broadcast tensor (a bias) in its own dtype, and
    torch does so in a norm of float16. XLA:CPU sums window by window (`xla_windows`).
    """
    if name != "sum" or torch.is_grad_enabled() or coarse <= precision.acc:
        return bridge(terms, precision)
    axes = args[1] if args[1:] and args[1] not in (None, []) else range(args[0].ndim)
    sizes = [args[0].shape[axis] for axis in ([axes] if isinstance(axes, int) else axes)]
    windows, last = xla_windows(sizes)
    of_total, of_squares, lost = bridge(last, replace(precision, acc=coarse))
    # In a window of n sums of variance v, the i-th addition rounds a sum of variance i*v.
    return of_total, of_squares + coarse**2 * sum(windows) / 2, lost


def of_places(
    func: OpOverload, args: tuple, terms: Any, precision: Precision
) -> tuple[Precision, Any]:
    """Return the precision of the first result's sums, and the terms, as a coarse kernel adds up.

    Without matrix units for the dtype, torch adds up the gradient of a convolution's input over the
    kernel's places in the dtype.
    """
    if func.overloadpacket.__name__ != "convolution_backward" or terms[0] is None:
        return precision, terms
    places = math.prod(args[2].shape[2:])
    return replace(precision, acc=precision.store), (terms[0].clamp(max=places), *terms[1:])


def adds(name: str, args: tuple, kwargs: Kwargs) -> bool:
    """Return whether an operator is a sum for which `linear_terms` finds the terms."""
    if name in ("index_put", "put"):
        return bool(kwargs.get("accumulate", args[3] if len(args) > 3 else False))
    if name == "scatter_reduce":
        return kwargs.get("reduce", args[4] if len(args) > 4 else None) == "sum"
    return name in _LINEAR or name in _POOLS


def linear_terms(func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Return sums of squared terms, and counts of terms, for each result of a summing operator."""
    squares, counts = (func(*each(fn, args), **each(fn, kwargs)) for fn in _OF_TERMS)
    if func.overloadpacket.__name__ in _POOLS:  # a mean over the elements of a window
        window = args[1] if len(args[1]) > 1 else args[1] * (args[0].ndim - 2)
        counts.fill_(math.prod(window))
        squares /= counts
    return squares, counts


_OF_TERMS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (torch.square, torch.ones_like)


class SumErrors(NamedTuple):
    """The errors of the sums in a product.

    by: their upper bounds, from `bounds`. squares: for a batched product, the sums of squared
    terms; None if float32 is too narrow for them.
    """

    by: torch.Tensor
    squares: torch.Tensor | None


class ProductErrors:
    """The errors of a run's products. Each needs a product of squares, as expensive as the product.

    Runs that differ by roundoffs have the same errors up to a roundoff, and reuse the first run's.

    first: the errors of a run with the same products in the same order, reused until one differs;
    None computes all. room: bytes of float32 to keep; errors beyond it, or beyond the range of
    float32, are computed each time.
    """

    def __init__(self, first: "ProductErrors | None" = None, room: int = _ROOM):
        self._kept: list[tuple[Call, SumErrors | None]] = []
        self._known = None if first is None else iter(first._kept)
        self._room = room
        self._batched: dict[_Places, tuple[torch.Tensor, int]] = {}
        """For each shape, the last batched product's squares, and its number of terms."""

    def of(self, name: str, args: tuple, totals: torch.Tensor, precision: Precision) -> SumErrors:
        """Return the errors of operator `name` of `PRODUCTS`, called with `args`; do not write to
        them."""
        a, b = args[PRODUCTS[name] :][:2]
        call = name, a.shape, b.shape
        errors = self._of_the_first(call)
        if errors is None:
            errors = _errors(name, a, b, totals, precision)
            if self._known is None and self._room > 0:
                self._keep(call, errors)
        if errors.squares is not None:
            self._batched[_places(errors.squares)] = errors.squares, a.shape[-1]
        return errors

    def _of_the_first(self, call: Call) -> SumErrors | None:
        if self._known is None:
            return None
        known_call, errors = next(self._known, (None, None))
        self._known = self._known if known_call == call else iter(())
        return errors if known_call == call else None

    def _keep(self, call: Call, errors: SumErrors) -> None:
        kept = errors._replace(by=by) if (by := _narrowed(errors.by)) is not None else None
        if kept is not None and (call[0] != "bmm" or kept.squares is not None):
            self._room -= sum(x.nbytes for x in kept if x is not None)
        else:
            kept = None
        self._kept.append((call, kept if self._room >= 0 else None))

    def change(self, tensors: tuple) -> None:
        """Forget products of these shapes, because an operator has changed them."""
        for x in tensors:
            if isinstance(x, torch.Tensor) and x.ndim > 1:
                self._batched.pop(_places(x), None)

    def again(self, products: torch.Tensor, precision: Precision) -> torch.Tensor | None:
        """Return the squared error of a batched product computed again, with sums in another order.

        None if no kept product has that shape, or if results are stored more coarsely than summed.
        """
        kept = self._batched.pop(_places(products), None) if products.ndim > 1 else None
        if kept is None or precision.store > precision.acc:
            return None
        squares, terms = kept[0].view(products.shape).double(), kept[1]
        of_total, of_squares, _ = bridge(terms, replace(precision, operand=0.0))
        totals = torch.minimum(products.square(), terms * squares)  # excludes a mask's fill
        return totals.mul_(2 * of_total).add_(squares, alpha=2 * of_squares)


def _places(x: torch.Tensor) -> _Places:
    return x.numel(), *x.shape[-2:]


def _errors(
    name: str, a: torch.Tensor, b: torch.Tensor, totals: torch.Tensor, precision: Precision
) -> SumErrors:
    """Compute the errors of the product of a and b; in a pass, from the first run for all runs."""
    totals = first_run(totals).detach()
    squares = first_run(a).square() @ first_run(b).square()
    narrow = _narrowed(squares) if name == "bmm" else None
    of_terms = bridge(a.shape[-1], precision)
    return SumErrors(bounds(totals, squares, of_terms, precision), narrow)


def bounds(
    totals: torch.Tensor, squares: torch.Tensor, of_terms: tuple, precision: Precision
) -> torch.Tensor:
    """Return upper bounds of the errors of sums; 0 where they are counts, which are exact.

    squares: the sums of squared terms; overwritten. of_terms: the result of `bridge`.
    """
    of_total, of_squares, lost = of_terms

    def part(_: slice, totals: torch.Tensor, squares: torch.Tensor) -> torch.Tensor:
        exact = is_count(totals, squares, max(precision.acc, precision.store))
        by = squares.mul_(of_squares).addcmul_(totals, totals, value=of_total).add_(lost).sqrt_()
        return by if exact is None else by.masked_fill_(exact, 0.0)

    return in_parts(part, totals, squares, out=squares)


def _narrowed(x: torch.Tensor) -> torch.Tensor | None:
    """Return x in float32; None if that is too narrow for one of its elements."""
    narrow = x.float()
    fits = (narrow >= _SMALLEST).logical_or_(x == 0).logical_and_(narrow.isfinite())
    return narrow if fits.all() else None


def is_count(total: torch.Tensor, squares: torch.Tensor, roundoff: float) -> torch.Tensor | None:
    """Return a mask of sums of small integers, which are exact in any order; None if none is."""
    # NumPy, because torch's comparisons take five times as long.
    numbers = (total.each if isinstance(total, RunsTensor) else total).detach().numpy()
    is_whole = numbers == np.rint(numbers)
    if not is_whole.any():
        return None
    whole = torch.from_numpy(np.asarray(is_whole))
    whole = RunsTensor(whole) if isinstance(total, RunsTensor) else whole
    return whole.logical_and_(squares == squares.round()).logical_and_(squares < 1 / roundoff)
