"""A torch mode that computes in float64 and moves every operation's result by a roundoff."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch._decomp import decomposition_table
from torch._ops import OpOverload

from jax_attn.parity.judge.budget import APPROXIMATED, PRECISIONS, Precision, bridge
from jax_attn.parity.judge.compare import POWER
from jax_attn.parity.run.modes.constants import (
    SOFTMAXES,
    Constants,
    Kwargs,
    Signature,
    each,
    mark,
    signature,
    sources_of,
)
from jax_attn.parity.run.modes.draws import Draws
from jax_attn.parity.run.modes.fills import SUMS_OF_TWO, stored_of_two
from jax_attn.parity.run.modes.float64_mode import (
    TORCH_DTYPES,
    Float64,
    Unperturbed,
    chooses,
    is_view,
    not_in_place,
    rounds,
)
from jax_attn.parity.run.modes.kernel_steps import (
    COMPOSED,
    STEPS,
    WRITTEN,
    as_operator,
    hidden_steps,
    laid_out_by_kernel,
    steps_of,
    unwritten_zeros,
)
from jax_attn.parity.run.modes.many_runs import (
    each_called,
    first_run,
)
from jax_attn.parity.run.modes.products import apart, bias_gradient_apart
from jax_attn.parity.run.modes.rounding import DrawnRounding, has_reciprocal
from jax_attn.parity.run.modes.sums import (
    PRODUCTS,
    SUM_TERMS,
    SUMS,
    ProductErrors,
    adds,
    bounds,
    bridge_of,
    is_count,
    linear_terms,
    of_places,
)

_OF_TWO = (*SUMS_OF_TWO, "mul")


class Perturbed(Unperturbed):
    """Float64 with every operation's result moved by one roundoff of `precision`.

    seeds: of the draws; a sequence makes one run for each seed, in one pass. constants: those that
    the module makes in its own dtype, in order. as_jax: if given, store in `precision`, as JAX may,
    each step of a softmax, each product before its bias is added, and each partial sum of a bias's
    gradient; its items say, for each softmax in order, whether the scores are in `precision`.
    products: the errors of this run's products, or of a similar run's.
    """

    _stores_softmax = False
    _rows_kept = 0.0
    """The roundoff of a kernel's sums over rows, if it is coarser than that of other sums."""

    def __init__(
        self,
        precision: Precision,
        seeds: int | Sequence[int] = 0,
        constants: Constants = (),
        as_jax: Iterable[bool] | None = None,
        products: ProductErrors | None = None,
    ):
        super().__init__()
        self.rounding = DrawnRounding(precision, Draws(seeds))
        self.seeds = (seeds,) if isinstance(seeds, int) else tuple(seeds)
        self._constants = list(constants)
        self._adds_in_dtype = as_jax is not None
        self._stored_softmaxes = iter(as_jax or ())
        self._stored_weights: set[int] = set()
        """Addresses of those softmaxes' weights, whose backward passes are stored too."""
        self.products = products or ProductErrors(room=0)

    @property
    def runs(self) -> int | None:
        """The number of runs in the pass; None for a single run."""
        return self.rounding.draws.runs

    @property
    def precision(self) -> Precision:
        """The precision in which all results are rounded."""
        return self.rounding.precision

    def kept(self, a: np.ndarray) -> np.ndarray:
        """Return an array rounded to the precision in which the module keeps it between calls."""
        draws = self.rounding.draws
        each = torch.from_numpy(a if self.runs else a[None])
        return draws.each(self.rounding.stored(draws.of(each))).numpy().reshape(a.shape)

    def dispatched(self, func: OpOverload, args: tuple, kwargs: Kwargs) -> Any:
        if not self._constants:
            if is_view(func) and args[0].dtype is torch.float64:
                return func(*args, **kwargs)
            return self._lifted(func, self._perturbed(func, args, kwargs))
        made_by = sources_of(func, args, kwargs)
        own = self.rounding
        if made_by is not None and rounds(func):
            precision = self._of_constant(signature(func, args, kwargs))
            self.rounding = replace(own, precision=precision)
        result = self._lifted(func, self._perturbed(func, args, kwargs))
        self.rounding = own
        mark(result, made_by)
        return result

    def _lifted(self, func: OpOverload, result: Any) -> Any:
        """Return an operator's result; in a pass, lifted so that each run has its own numbers.

        The module may write a run's numbers to a tensor that it made from constants only.
        """
        alone = self.rounding.draws.runs is None or func._schema.is_mutable or func.is_view
        return result if alone else each(self.rounding.draws.lifted, result)

    def _perturbed(self, func: OpOverload, args: tuple, kwargs: Kwargs) -> Any:
        if any(isinstance(x, torch.Tensor) and x.layout is not torch.strided for x in args):
            return self._sparse(func, args, dict(kwargs))
        plain = func.overloadpacket.__name__.removesuffix("_")
        is_sum = plain in SUMS or adds(plain, args, kwargs)
        if not is_sum and (not rounds(func) or chooses(func, args, kwargs)):
            return super().dispatched(func, args, kwargs)
        kwargs = {name: self.rounding.number(value) for name, value in kwargs.items()}
        if plain == "div" and has_reciprocal(args[1]) and not kwargs.get("rounding_mode"):
            args = (args[0], self.rounding.divisor(args[1]))
        else:
            args = tuple(map(self.rounding.number, args))
        if not func._schema.is_mutable:
            return super().dispatched(func, args, kwargs)
        if plain in COMPOSED or plain in APPROXIMATED or plain in _OF_TWO or is_sum:
            return args[0].copy_(self.compute(not_in_place(func), args, kwargs))
        result = super().dispatched(func, args, kwargs)
        result.copy_(each(self.rounding.stored, result))
        return result

    def call(self, func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Return the operator's own result, run by run if it takes numbers that differ by run."""
        call = as_operator(func, args, kwargs)
        return each_called(*call) if self.runs else call[0](*call[1], **call[2])

    def _sparse(self, func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Return an operator's result on sparse tensors, whose own numbers stay as they are."""
        if rounds(func) and not func._schema.is_mutable:
            steps = hidden_steps(func, args, kwargs)
            args, kwargs = each(partial(self.rounding.nearby, steps=steps), (args, kwargs))
        return each(self.rounding.stored, self.call(func, args, kwargs))

    def _of_constant(self, call: Signature) -> Precision:
        """Return the precision of the next constant; the run's own once the order differs."""
        recorded, dtype = self._constants.pop(0) if self._constants else (None, None)
        if recorded != call:
            self._constants.clear()
            return self.precision
        kept = [PRECISIONS[name] for name, of in TORCH_DTYPES.items() if of is dtype]
        return min([self.precision, *kept], key=lambda precision: precision.store)

    def compute(self, func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
        name = func.overloadpacket.__name__
        if name in SOFTMAXES:
            return self._next_softmax(func, args, kwargs)
        if chooses(func, args, kwargs) or not (rounds(func) or adds(name, args, kwargs)):
            return super().compute(func, args, kwargs)
        if name == "_softmax_backward_data":
            return self._scores_gradient(func, args, kwargs)
        if name not in SUMS_OF_TWO and name not in SUMS:  # a fused kernel's products end here
            self.products.change(args)
        if self._adds_in_dtype and (parts := apart(func, args, kwargs)):
            product = self.compute(parts.product, parts.factors, {})
            return self.compute(torch.ops.aten.add.Tensor, (product, parts.bias), {})
        if self._adds_in_dtype and (steps := bias_gradient_apart(func, args)):
            *others, _ = self.compute(func, steps[0], kwargs)
            return *others, self.compute(torch.ops.aten.sum.dim_IntList, steps[1], {})
        if adds(name, args, kwargs):
            return self._linear(func, args, kwargs)
        if name not in SUMS:
            return self._kernel(func, args, kwargs)
        total = super().compute(func, args, kwargs)
        if not total.is_floating_point():
            return total
        if name in PRODUCTS:
            by = self.products.of(name, args, total, self.precision).by
            return self.rounding.summed(total, by)
        squares, terms = SUM_TERMS[name](*args, **kwargs)
        total, squares = map(self.rounding.draws.lifted, (total, squares))
        total *= terms * self.rounding.number(1 / terms) if name == "mean" and terms else 1.0
        over_rows = len(args) > 1 and isinstance(args[1], list) and 0 in args[1]
        own = self.precision.store if self._adds_in_dtype else 0.0
        coarse = max(own, self._rows_kept if over_rows else 0.0)
        by = bounds(
            total, squares, bridge_of(name, terms, args, self.precision, coarse), self.precision
        )
        return self.rounding.summed(total, by)

    def _linear(self, func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Return the results of a summing operator, each moved by the error of its sums."""
        totals = super().compute(func, args, kwargs)
        squares, terms = linear_terms(func, args, kwargs)
        if isinstance(totals, torch.Tensor):
            return self._added(totals, squares, terms)
        precisions = [self.precision] * len(totals)
        if self._adds_in_dtype:
            precisions[0], terms = of_places(func, args, terms, self.precision)
        return tuple(map(self._added, totals, squares, terms, precisions))

    def _added(
        self, total: Any, squares: Any, terms: Any, precision: Precision | None = None
    ) -> Any:
        if total is None or not total.is_floating_point():
            return total
        of_total, of_squares, lost = bridge(terms, precision or self.precision)
        exact = is_count(total, squares, max(self.precision.acc, self.precision.store))
        by = (of_total * total.square()).add_(of_squares * squares).add_(lost).sqrt_()
        return self.rounding.summed(total, by if exact is None else by.masked_fill_(exact, 0.0))

    def _kernel(self, func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run one kernel, with its steps, if torch knows them, rounded as sums are; then store."""
        name = func.overloadpacket.__name__
        if name == "embedding_dense_backward":
            return self._embedding_backward(func, *args)
        result: Any = NotImplemented
        if name in COMPOSED or name in WRITTEN or self._stores_steps(name, args):
            with self._inside(self.precision):
                result = steps_of(func)(*args, **kwargs)
            if result is not NotImplemented:
                return laid_out_by_kernel(name, result)
        if torch.Tag.pointwise not in func.tags:
            if known := STEPS.get(name) or decomposition_table.get(func):
                inside = self._inside(replace(self.precision, store=self.precision.acc))
                # Inside a norm's kernel torch adds up float16's bias gradients in float16.
                if self._adds_in_dtype or self.dtype is torch.float16:
                    inside._rows_kept = self.precision.store
                with inside:
                    result = known(*args, **kwargs)
            if result is NotImplemented:
                nearby = partial(self.rounding.nearby, steps=hidden_steps(func, args, kwargs))
                args, kwargs = each(nearby, (args, kwargs))
        if result is NotImplemented:
            result = Float64.compute(self, func, args, kwargs)
        if name in APPROXIMATED:
            result = self.rounding.approximated(result, APPROXIMATED[name] * self.precision.acc)
        if name in _OF_TWO and result.is_floating_point():
            return stored_of_two(self.rounding, self.dtype, name, result, args, kwargs)
        return each(self.rounding.stored, laid_out_by_kernel(name, result))

    def _next_softmax(self, func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
        self._stores_softmax = next(self._stored_softmaxes, False)
        weights = super().compute(func, args, kwargs)
        if self._stores_softmax:
            self._stored_weights.add(first_run(weights).data_ptr())
        else:
            self._stored_weights.discard(first_run(weights).data_ptr())
        return weights

    def _stores_steps(self, name: str, args: tuple) -> bool:
        """Return whether each step of a softmax, or of its backward pass, is stored."""
        if name in SOFTMAXES:
            return self._stores_softmax
        return (
            name == "_softmax_backward_data"
            and first_run(args[1]).data_ptr() in self._stored_weights
        )

    def _embedding_backward(
        self,
        func: OpOverload,
        d_out: torch.Tensor,
        indices: torch.Tensor,
        count: int,
        padding: int,
        by_frequency: bool,
    ) -> torch.Tensor:
        """Run its steps for the rows that are read; the other rows of the long table are 0."""
        rows, read = indices.long().unique(return_inverse=True)
        at = (rows == padding).nonzero().flatten().tolist()
        with self._inside(replace(self.precision, store=self.precision.acc)):
            few = decomposition_table[func](d_out, read, len(rows), *(at or [-1]), by_frequency)
        table = self.rounding.draws.lifted(unwritten_zeros((count, *few.shape[1:])))
        return table.index_copy_(0, rows, self.rounding.stored(few))

    def _inside(self, precision: Precision) -> "Perturbed":
        """Return a mode with the same draws, for a kernel's intermediates in `precision`."""
        inside, is_finer = Perturbed(precision), precision.store < self.precision.store
        # Numbers beyond float16 stay finite inside a kernel, such as a norm's backward sums.
        inside.dtype = torch.float32 if is_finer else self.dtype
        inside._adds_in_dtype = self._adds_in_dtype
        inside.rounding = replace(self.rounding, precision=precision)
        inside.products = self.products
        return inside

    def _weights(self, func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> torch.Tensor:
        scores, dim, *others = args
        # In a row filled by a mask no correct code keeps l, only what it adds to the fill.
        top = scores.amax(dim, keepdim=True)
        scores = scores - torch.where(self.precision.acc * top.abs() >= POWER, top, 0.0)
        again = self.products.again(scores, self.precision)
        weights = self._kernel(func, (scores, dim, *others), kwargs)
        kept = torch.logsumexp(scores, dim, keepdim=True)
        by = self.precision.acc * kept.abs()
        weights.mul_(self.rounding.alike(kept).mul_(by).add_(1))
        if again is None:
            return weights
        # A fused backward kernel recomputes the scores, but keeps the first ones' log-sum.
        by = again.sqrt_()
        return weights.mul_(self.rounding.alike(by).mul_(by).add_(1))

    def _scores_gradient(
        self, func: OpOverload, args: tuple, kwargs: dict[str, Any]
    ) -> torch.Tensor:
        """Return P * (dP - delta), with delta as a fused kernel computes it, dO·O.

        Its sum over the features is not that of dP = dO·V: where dP and delta cancel, their errors
        do not. By Jensen's inequality the squared terms of dO·O are at most the mean of those of
        dP, weighted by P.
        """
        d_weights, weights, dim, *_ = args
        again = self.products.again(d_weights, self.precision)
        d_scores = self._kernel(func, args, kwargs)
        if again is None:
            return d_scores
        by = again.mul_(weights).sum(dim, keepdim=True).sqrt_()
        return d_scores.addcmul_(weights, self.rounding.alike(by).mul_(by))
