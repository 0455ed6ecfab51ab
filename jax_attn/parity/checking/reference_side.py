"""Hold what judging reads of a reference: numbers and words, and the comparison of a run with them.

`Prepared` computes them from a torch module when they are first needed. A golden reference holds
them, and may come from a file.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from jax_attn.parity.judge.budget import PRECISIONS, RUNS, Budget
from jax_attn.parity.judge.compare import PLANTED, POWER, TensorReport, Verdict, judge, rms
from jax_attn.parity.judge.finding import Finding, findings
from jax_attn.parity.judge.result import Result
from jax_attn.parity.run.inputs_and_runs import (
    COMPARED,
    SECOND,
    Arrays,
    Inputs,
    Run,
    wide,
)

if TYPE_CHECKING:
    from jax_attn.parity.run.reference import Reference


TAPS = "taps"
"""The question for the tensors inside a reference, which only `prepare(…, taps=True)` asks."""


class NotAskedError(LookupError):
    """A reference that is not at hand was not asked a question. The argument is a name for it."""


def _kind_of_number(dtype: np.dtype) -> str:
    """Return the kind of an output's numbers; an integer's width differs between frameworks."""
    if dtype.kind == "b":
        return "boolean"
    return "integer" if dtype.kind in "iu" else "floating-point"


def _may_pass_again(report: TensorReport) -> bool:
    """Return whether a tensor fails, or the reference's own errs by more than its budget."""
    errs = report.reference_error is not None and report.reference_error > report.budget
    return report.verdict is Verdict.FAIL or (report.verdict is not Verdict.PASS and errs)


class ReferenceSide:
    """A reference on its inputs, as a port is compared with it.

    dtype: the dtype of both modules. gradients: whether gradients are compared. seed: that of the
    cotangents. precision: the precision of the budget, if it differs from `dtype` (a matrix unit
    that rounds). as_jax: whether the budget allows for what JAX stores.
    declared_nan: output name -> where the reference gives NaN, as published, and the oracle does
        not. There, and for every gradient, only the oracle is used, since one NaN reaches every
        gradient.
    inputs: those of both sides. parameters: the names of the parameters whose gradients are
        compared; None stands for all.
    differentiated: the cotangents by output; none if gradients are not compared.
    inference: the reference's outputs in inference mode. unnested: the same without the nested
        tensors of torch's encoders; empty if none nests. nested_encoder: the name of such an
        encoder, or "".
    own: the reference's run in `dtype`. exact: the oracle's, in float64. budgets: kind -> name ->
        budget of a tensor.
    buffers: the reference's buffers before any call, in float64. remembers: whether it keeps state
        of a call outside its buffers. padding_rows: row `padding_idx` by name of an embedding's
        parameter.
    near_decisions, near_sides: sentences on decisions, and on numbers at which a gradient jumps,
        that lie within rounding of another.
    has_gradient: whether an output has a gradient. narrowing_casts: the casts to a coarser dtype.
    again: in a narrow dtype, the same with both budgets, its own for what JAX stores and that of
        its `first`: a tensor passes if it passes by one. Otherwise None.
    first: the one whose `again` this is, else this one; the two differ only in their budgets.
    """

    if TYPE_CHECKING:  # a subclass has each as a field, or computes it when it is first read

        @property
        def dtype(self) -> str: ...

        @property
        def gradients(self) -> bool: ...

        @property
        def seed(self) -> int: ...

        @property
        def precision(self) -> str | None: ...

        @property
        def as_jax(self) -> bool: ...

        @property
        def declared_nan(self) -> Arrays: ...

        @property
        def inputs(self) -> Inputs: ...

        @property
        def parameters(self) -> frozenset[str] | None: ...

        @property
        def differentiated(self) -> Arrays: ...

        @property
        def inference(self) -> Arrays: ...

        @property
        def unnested(self) -> Arrays: ...

        @property
        def nested_encoder(self) -> str: ...

        @property
        def own(self) -> Run: ...

        @property
        def exact(self) -> Run: ...

        @property
        def budgets(self) -> Mapping[str, Mapping[str, Budget]]: ...

        @property
        def buffers(self) -> Arrays: ...

        @property
        def remembers(self) -> bool: ...

        @property
        def padding_rows(self) -> Mapping[str, int]: ...

        @property
        def near_decisions(self) -> tuple[str, ...]: ...

        @property
        def near_sides(self) -> tuple[str, ...]: ...

        @property
        def has_gradient(self) -> bool: ...

        @property
        def narrowing_casts(self) -> tuple[str, ...]: ...

        @property
        def again(self) -> "Self | None": ...

        @property
        def first(self) -> "Self": ...

    def answer(self, question: str) -> Any:
        """Return what the reference says to a probe's question.

        Raises NotAskedError if it was not asked when the reference was at hand.
        """
        raise NotImplementedError

    @property
    def notes(self) -> tuple[Finding, ...]:
        """Notes for every result, such as where the reference comes from."""
        return ()

    @property
    def at_hand(self) -> "Reference | None":
        """The torch module with its inputs; None if it was prepared elsewhere."""
        return None

    @property
    def hidden(self) -> set[str]:
        """The canaries that these inputs hide or that left a note, if they are planted here."""
        return set()

    def judge_one(
        self, kind: str, name: str, transform: str, got: np.ndarray, beside: Run | None = None
    ) -> TensorReport:
        """Judge one float64 tensor, by either budget if this is the `again` of a `first`.

        beside: the run with which it is compared; None stands for the oracle's run.
        """
        if self.first is not self:
            report = self.first.judge_one(kind, name, transform, got, beside)
            if report.verdict is Verdict.PASS:
                return report
        return self._judge_by_own(kind, name, transform, got, beside)

    def _judge_by_own(
        self, kind: str, name: str, transform: str, got: np.ndarray, beside: Run | None = None
    ) -> TensorReport:
        """Judge one float64 tensor by this one's own budgets only."""
        # A reference without changed state gives the same outputs in a second call.
        of = "output" if kind == SECOND and not self.exact.second else kind
        want = (beside or self.exact).kinds[of][name]
        own = self.own.kinds[of][name]
        guide: np.ndarray | None = None if beside else own
        if self.declared_nan and not beside:
            declared = self.declared_nan.get(name) if kind == "output" else None
            guide = None if declared is None else np.where(declared, want, own)
        budget = self.budgets[of][name]
        moves = budget.moves
        if moves is not None and got.shape == want.shape and not (moves > 0).all():
            # An index or a condition: exact, except where perturbed runs decide otherwise.
            got, own = (np.where(np.abs(a - want) <= moves, want, a) for a in (got, own))
            guide = None if guide is None else own
            budget = Budget.of(want, [want] * RUNS, PRECISIONS[self.dtype])
        if beside and rms(self.exact.kinds[of][name]) <= budget.zero:
            budget = replace(budget, zero=math.inf)  # both runs hold only rounding
        return judge(want, got, guide, budget, kind=kind, name=name, transform=transform)

    def compare(
        self,
        run: Run,
        transform: str,
        passed_over: Collection[str] = (),
        beside: Run | None = None,
        *,
        is_paired: bool = False,
    ) -> Iterator[TensorReport]:
        """Yield one report for each tensor of `run`, under the reference's names.

        Parameter gradients are left out if `run` has none, unless a table pairs them (is_paired),
        or if the table passes over the parameter. Raises ValueError if another tensor of the
        reference has no counterpart in `run`, and TypeError if an output holds another kind of
        number.

        beside: as for `judge_one`.
        """
        for kind in COMPARED:
            got = run.kinds[kind]
            over = passed_over if kind == "gradient of parameter" else ()
            tensors = {k: a for k, a in self.exact.kinds[kind].items() if k not in over}
            if kind == "gradient of parameter" and not got and not is_paired:
                continue
            if got.keys() != tensors.keys():
                raise ValueError(
                    f"{kind}: the reference has {sorted(tensors)}, the port {sorted(got)}"
                )
            if kind == "output" and (problems := list(self._other_kinds(run.outputs))):
                raise TypeError("\n".join(problems))
            yield from (
                self.judge_one(kind, name, transform, got[name], beside) for name in tensors
            )
            if kind == "output" and any(got[name].shape != tensors[name].shape for name in tensors):
                return  # this is already a failure, and no cotangent fits

    def _other_kinds(self, outputs: Arrays) -> Iterator[str]:
        """Yield a line for each output that is boolean, integer or floating, unlike ours."""
        for name, own in self.own.outputs.items():
            want, got = (_kind_of_number(a.dtype) for a in (own, outputs[name]))
            if want != got:
                yield f"output {name!r}: expected {want} numbers as of the reference, got {got}"

    def would_fail(self, run: Run) -> bool:
        """Return whether a tensor of `run`, which has a planted bug, fails in the port's place."""
        return any(
            self.judge_one(kind, name, PLANTED, got).verdict is Verdict.FAIL
            for kind in COMPARED
            for name, got in run.kinds[kind].items()
        )

    @cached_property
    def inference_reports(self) -> dict[str, TensorReport]:
        """The reports on the reference's own outputs in inference mode; declared NaN passes."""
        want, reports = self.exact.kinds["output"], {}
        for name, got in wide(self.inference).items():
            if name in self.declared_nan:
                got = np.where(self.declared_nan[name], want[name], got)
            reports[name] = self.judge_one("output", name, "inference", got)
        return reports

    @cached_property
    def has_power(self) -> bool:
        """True if the budget of some output is small enough to show an error of POWER times it.

        With both budgets, both must be.
        """
        if self.first is not self and not self.first.has_power:
            return False
        reports = (
            self._judge_by_own("output", name, "oracle", want)
            for name, want in self.exact.kinds["output"].items()
        )
        return any(report.budget <= POWER * report.scale or not report.scale for report in reports)

    @property
    def by_either(self) -> "ReferenceSide":
        """In a narrow dtype, the same with both budgets."""
        return self.again or self

    def judged_again(self, result: Result, judge: Callable[["ReferenceSide"], Result]) -> Result:
        """In a narrow dtype, judge failures again, also by the budget of what JAX stores.

        Both ways are correct: to keep each step of a softmax and each partial sum of a bias's
        gradient in float32, as torch does, or in the dtype, as JAX may. So are both ways to add up
        the gradient of a convolution's input; torch takes the coarser on some processors. If a
        tensor still does not pass, doubts name the numbers that lie within rounding of a ReLU's 0.

        judge: the function that made `result`.
        """
        last: ReferenceSide = self
        if self.again and (
            any(map(_may_pass_again, (*result.tensors, *self.inference_reports.values())))
            or any(failure.kind == "input-ignored" for failure in result.failures)
        ):
            last = self.by_either
            result = judge(last)
        if not self.gradients or all(report.verdict is Verdict.PASS for report in result.tensors):
            return result
        near = findings("near-side", last.near_sides)
        return replace(result, doubts=(*result.doubts, *near))
