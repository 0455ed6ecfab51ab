"""The reference's side of a check, which does not depend on the port.

From top to bottom: the reference and its inputs, its runs in the checked dtype, the oracle's run in
float64, the budgets from perturbed runs, and the comparison of a run with them.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, TypeVar

import numpy as np

from jax_attn.parity.judge.budget import PRECISIONS, RUNS, Budget
from jax_attn.parity.judge.compare import (
    PLANTED,
    POWER,
    ROUNDINGS,
    TensorReport,
    Verdict,
    judge,
    rms,
)
from jax_attn.parity.judge.finding import findings
from jax_attn.parity.judge.result import Result
from jax_attn.parity.run.inputs_and_runs import (
    COMPARED,
    SECOND,
    Arrays,
    Inputs,
    Run,
    is_float,
    wide,
)
from jax_attn.parity.run.port import float_dtype
from jax_attn.parity.run.reference import Reference, Watch, unwatched
from jax_attn.parity.run.torch_call import buffers
from jax_attn.parity.run.torch_settings import own_products

Fact = TypeVar("Fact")
NARROW = ("bfloat16", "float16")

_RUNS_OF_FLOAT64 = 4
# For eight numbers in bfloat16, 16 runs gave budgets of .06 to .12 of their scale, 64 runs .08.
_FEW, _MORE = 2**10, 4


def _may_pass_again(report: TensorReport) -> bool:
    """Return whether a tensor fails, or the reference's own errs by more than its budget."""
    errs = report.reference_error is not None and report.reference_error > report.budget
    return report.verdict is Verdict.FAIL or (report.verdict is not Verdict.PASS and errs)


@dataclass(frozen=True)
class Prepared:
    """A reference on its inputs, and all that a port is compared with; each part is computed once.

    oracle: cotangents -> `Run` in float64; None stands for the reference itself in float64.
    precision: the precision of the budget, if it differs from `dtype` (a matrix unit that rounds).
    declared_nan: output name -> where the reference gives NaN, as published, and the oracle does
        not. There, and for every gradient, only the oracle is used, since one NaN reaches every
        gradient.
    runs: the number of perturbed runs for the budgets. as_jax, watch: as for `Reference.spread`.
    """

    reference: Reference
    dtype: str
    gradients: bool = True
    seed: int = 0
    oracle: Callable[[Arrays], Run] | None = None
    precision: str | None = None
    declared_nan: Arrays = field(default_factory=dict)
    runs: int = RUNS
    as_jax: bool = False
    watch: Watch = unwatched

    @cached_property
    def inference(self) -> dict[str, np.ndarray]:
        """The reference's outputs in inference mode, where torch may take a faster path."""
        with self._products():
            return self.reference.outputs(self.dtype)

    @cached_property
    def cotangents(self) -> dict[str, np.ndarray]:
        """A cotangent for each floating output, standard normal, rounded to `dtype`."""
        rng = np.random.default_rng([self.seed, 1])
        dtype = float_dtype(self.dtype)
        return {
            name: rng.standard_normal(a.shape).astype(dtype)
            for name, a in self.inference.items()
            if is_float(a.dtype)
        }

    @cached_property
    def inputs(self) -> Inputs:
        """The inputs of both sides."""
        return self.reference.inputs

    @cached_property
    def parameters(self) -> frozenset[str] | None:
        """The parameters whose gradients are compared; None for all."""
        return self.reference.parameters

    @cached_property
    def buffers(self) -> Arrays:
        """The reference's buffers before any call, in float64."""
        return wide(buffers(self.reference.module))

    @cached_property
    def remembers(self) -> bool:
        """True if the reference keeps state of a call outside its buffers."""
        return self.reference.remembers()

    @property
    def differentiated(self) -> dict[str, np.ndarray]:
        """The cotangents, or none if gradients are not compared."""
        return self.cotangents if self.gradients else {}

    @cached_property
    def own(self) -> Run:
        """The reference's run in `dtype`."""
        with self._products():
            return self.reference.run(self.dtype, self.differentiated)

    def _products(self) -> AbstractContextManager[None]:
        """Use torch's own products if NaN is declared; oneDNN's with AMX spread it in bfloat16."""
        return own_products() if self.declared_nan else nullcontext()

    @cached_property
    def _center(self) -> tuple[Run, bool]:
        """The result of `Reference.center`."""
        return self.reference.center(self.differentiated)

    @cached_property
    def exact(self) -> Run:
        """The oracle's run, in float64."""
        if self.oracle is None:
            run, is_exact = self._center
            return run if is_exact else self.reference.exact(self.differentiated)
        run = self.oracle(wide(self.cotangents))
        return run if self.gradients else Run(run.outputs, {}, {})

    @cached_property
    def budgets(self) -> dict[str, dict[str, Budget]]:
        """Kind -> name -> budget of the tensor."""
        center, _ = self._center
        precision = self.precision or self.dtype
        spread = partial(
            self.reference.spread,
            precision,
            self.differentiated,
            center=center,
            as_jax=self.as_jax,
            watch=self.watch,
        )
        budgets = spread(runs=self.runs)
        # A jump of one element in a few of the runs is estimated badly, too.
        jumps = self.as_jax and self.gradients and self.reference.near_sides
        if self.runs == RUNS and (jumps or self._few_numbers_decide(budgets)):
            budgets = spread(runs=_MORE * RUNS)
        coarse = PRECISIONS[precision]
        finer = max(coarse.store, coarse.operand) / coarse.acc
        if not any(
            budget.zero < rms(center.kinds[kind][name]) <= finer * budget.zero
            for kind, named in budgets.items()
            for name, budget in named.items()
        ):
            return budgets
        # A format that stores coarsely and sums finely rounds differently from float64. If a sum of
        # many terms is zero, float64 may leave more of it than the share derived from `store`, so
        # measure how much it leaves.
        own = self.reference.spread("float64", self.differentiated, _RUNS_OF_FLOAT64, center)
        return {
            kind: {
                name: replace(budget, zero=max(budget.zero, own[kind][name].zero))
                for name, budget in named.items()
            }
            for kind, named in budgets.items()
        }

    @cached_property
    def near_decisions(self) -> tuple[str, ...]:
        """Sentences on integer decisions of the reference that lie within rounding of another."""
        _ = self.budgets  # the perturbed runs find them
        return self.reference.near_decisions

    @cached_property
    def near_sides(self) -> tuple[str, ...]:
        """Numbers of the reference that lie within rounding of where a gradient jumps."""
        _ = self.budgets
        return self.reference.near_sides

    def _few_numbers_decide(self, budgets: Mapping[str, Mapping[str, Budget]]) -> bool:
        """Return whether a small tensor lacks power; a few runs estimate its spread badly."""
        center, _ = self._center
        return any(
            ROUNDINGS * budget.rms > POWER * (scale := rms(center.kinds[kind][name]))
            and scale > budget.zero
            and budget.element.size < _FEW
            for kind, named in budgets.items()
            for name, budget in named.items()
        )

    def judge_one(
        self, kind: str, name: str, transform: str, got: np.ndarray, beside: Run | None = None
    ) -> TensorReport:
        """Judge one float64 tensor.

        beside: the run with which it is compared; None stands for the oracle's run.
        """
        # A reference without changed state gives the same outputs in a second call.
        of = "output" if kind == SECOND and not self.exact.second else kind
        want = (beside or self.exact).kinds[of][name]
        own = self.own.kinds[of][name]
        guide: np.ndarray | None = None if beside else own
        if self.declared_nan and not beside:
            declared = self.declared_nan.get(name) if kind == "output" else None
            guide = None if declared is None else np.where(declared, want, own)
        budget = self.budgets[of][name]
        if (
            of == "output"
            and got.shape == want.shape
            and not is_float(self.own.outputs[name].dtype)
        ):
            # An index or a condition: exact, except where a perturbed run decides otherwise.
            got = np.where(budget.element > POWER, want, got)
            budget = Budget.of(want, [want] * _RUNS_OF_FLOAT64, PRECISIONS[self.dtype])
        if beside and rms(self.exact.kinds[of][name]) <= budget.zero:
            budget = replace(budget, zero=math.inf)  # both runs hold only rounding
        return judge(want, got, guide, budget, kind=kind, name=name, transform=transform)

    def compare(
        self,
        run: Run,
        transform: str,
        passed_over: Collection[str] = (),
        beside: Run | None = None,
    ) -> Iterator[TensorReport]:
        """Yield one report for each tensor of `run`, under the reference's names.

        Parameter gradients are left out if `run` has none, because no table pairs them, or if the
        table passes over the parameter. Raises ValueError if another tensor of the reference has no
        counterpart in `run`.

        beside: as for `judge_one`.
        """
        for kind in COMPARED:
            got = run.kinds[kind]
            over = passed_over if kind == "gradient of parameter" else ()
            tensors = {k: a for k, a in self.exact.kinds[kind].items() if k not in over}
            if kind == "gradient of parameter" and not got:
                continue
            if got.keys() != tensors.keys():
                raise ValueError(
                    f"{kind}: the reference has {sorted(tensors)}, the port {sorted(got)}"
                )
            yield from (
                self.judge_one(kind, name, transform, got[name], beside) for name in tensors
            )
            if kind == "output" and any(got[name].shape != tensors[name].shape for name in tensors):
                return  # this is already a failure, and no cotangent fits

    def would_fail(self, run: Run) -> bool:
        """Return whether a tensor of `run`, which has a planted bug, fails in the port's place."""
        return any(
            self.judge_one(kind, name, PLANTED, got).verdict is Verdict.FAIL
            for kind in COMPARED
            for name, got in run.kinds[kind].items()
        )

    @cached_property
    def has_power(self) -> bool:
        """True if the budget of some output is small enough to show an error of POWER times it."""
        reports = (
            self.judge_one("output", name, "oracle", want)
            for name, want in self.exact.kinds["output"].items()
        )
        return any(report.budget <= POWER * report.scale or not report.scale for report in reports)

    @cached_property
    def again(self) -> "Prepared | None":
        """The same with a budget for what JAX stores, which is tried if a narrow dtype fails.

        None in a wide dtype, and if `self` already has that budget.
        """
        if self.dtype not in NARROW or self.as_jax:
            return None
        again = replace(self, as_jax=True)
        runs = ("inference", "cotangents", "own", "_center", "exact")
        shared = (*runs, "buffers", "remembers")
        vars(again).update({name: vars(self)[name] for name in shared if name in vars(self)})
        vars(again)["first"] = self
        return again

    @cached_property
    def first(self) -> "Prepared":
        """The one whose `again` this is, else this one; the two differ only in their budgets."""
        return self

    def judged_again(self, result: Result, judge: Callable[["Prepared"], Result]) -> Result:
        """In a narrow dtype, judge failures again by the budget of what JAX stores.

        Both ways are correct: to keep each step of a softmax and each partial sum of a bias's
        gradient in float32, as torch does, or in the dtype, as JAX may. So are both ways to add up
        the gradient of a convolution's input; torch takes the coarser on some processors. If a
        tensor still does not pass, doubts name the numbers that lie within rounding of a ReLU's 0.

        judge: the function that made `result`.
        """
        last = self
        if self.again and any(map(_may_pass_again, result.tensors)):
            last = self.again
            again = judge(last)
            pairs = zip(result.tensors, again.tensors, strict=True)
            result = replace(
                again, tensors=tuple(a if a.verdict is Verdict.PASS else b for a, b in pairs)
            )
        if not self.gradients or all(report.verdict is Verdict.PASS for report in result.tensors):
            return result
        near = findings("near-side", last.near_sides)
        return replace(result, doubts=(*result.doubts, *near))

    # --- other facts about the reference ----------------------------------------------------------

    def fact(self, prepare: Callable[["Prepared"], Fact]) -> Fact:
        """Return `prepare(self)`, computed once."""
        if prepare not in self._facts:
            self._facts[prepare] = prepare(self)
        return self._facts[prepare]

    @cached_property
    def _facts(self) -> dict[Callable[["Prepared"], Any], Any]:
        return {}

    def complete(self) -> None:
        """Compute every number that a comparison may need; it uses no module afterwards."""
        _ = self.inputs, self.parameters, self.differentiated, self.own, self.exact, self.budgets
        _ = self.buffers, self.remembers, self.near_decisions, self.near_sides
