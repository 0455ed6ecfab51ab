"""The reference's side of a check, all that does not depend on the port; and a port's verdict.

It flows from top to bottom: the reference and its inputs, its runs in the checked dtype, the
oracle's run in float64, the budgets from perturbed runs, and the comparison of a run with them.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import numpy as np

from jax_attn.parity.checking.on_mesh import unlike_copies
from jax_attn.parity.checking.padding_row import padding_rows, without_padding_row
from jax_attn.parity.checking.repeats import not_finite_under_some, other_numbers
from jax_attn.parity.checking.state import StateFindings, States
from jax_attn.parity.checking.weights import ToTorch
from jax_attn.parity.judge.budget import PRECISIONS, RUNS, Budget
from jax_attn.parity.judge.compare import (
    BESIDE,
    PLANTED,
    POWER,
    ROUNDINGS,
    TensorReport,
    Verdict,
    judge,
    rms,
)
from jax_attn.parity.judge.finding import Finding, StandingNote, findings
from jax_attn.parity.judge.result import Result
from jax_attn.parity.run.inputs_and_runs import COMPARED, SECOND, Arrays, Run, wide
from jax_attn.parity.run.port import Port, float_dtype, full_precision
from jax_attn.parity.run.reference import Reference, Watch, own_products, unwatched

NARROW = ("bfloat16", "float16")

_RUNS_OF_FLOAT64 = 4
# Of eight numbers in bfloat16, 16 runs gave budgets from .06 to .12 of their scale, 64 runs .08.
_FEW, _MORE = 2**10, 4


@dataclass(frozen=True)
class Prepared:
    """A reference on its inputs, and what a port is compared with; each part is computed once.

    oracle: cotangents -> `Run` in float64; None: the reference itself in float64.
    precision: the budget's, where it is not `dtype`'s own (a matrix unit that rounds).
    declared_nan: output name -> where the reference gives NaN, as published, and the oracle
        does not. There the oracle alone judges; so it does for every gradient, since one NaN
        reaches them all.
    runs: how many perturbed ones the budgets are from. as_jax, watch: as for `Reference.spread`.
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
        """One for each output, standard normal, rounded to `dtype`."""
        rng = np.random.default_rng([self.seed, 1])
        dtype = float_dtype(self.dtype)
        return {
            name: rng.standard_normal(a.shape).astype(dtype) for name, a in self.inference.items()
        }

    @property
    def differentiated(self) -> dict[str, np.ndarray]:
        """The cotangents where gradients are compared, else none."""
        return self.cotangents if self.gradients else {}

    @cached_property
    def own(self) -> Run:
        """What the reference gives in `dtype`."""
        with self._products():
            return self.reference.run(self.dtype, self.differentiated)

    def _products(self) -> AbstractContextManager[None]:
        """Beside a declared NaN torch's own products: with AMX, oneDNN's in bfloat16 spread it."""
        return own_products() if self.declared_nan else nullcontext()

    @cached_property
    def _center(self) -> tuple[Run, bool]:
        """As `Reference.center` gives it."""
        return self.reference.center(self.differentiated)

    @cached_property
    def exact(self) -> Run:
        """What the oracle gives."""
        if self.oracle is None:
            run, is_exact = self._center
            return run if is_exact else self.reference.exact(self.differentiated)
        run = self.oracle(wide(self.cotangents))
        return run if self.gradients else Run(run.outputs, {}, {})

    @cached_property
    def budgets(self) -> dict[str, dict[str, Budget]]:
        """kind -> name -> what the tensor may err by."""
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
        # What jumps for one element in few runs is estimated badly, too.
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
        # Float64 has other roundings than a format that stores coarsely and sums finely: of a zero
        # that is a sum of many terms, it may leave more than the store's share. How much is asked.
        own = self.reference.spread("float64", self.differentiated, _RUNS_OF_FLOAT64, center)
        return {
            kind: {
                name: replace(budget, zero=max(budget.zero, own[kind][name].zero))
                for name, budget in named.items()
            }
            for kind, named in budgets.items()
        }

    @property
    def near_decisions(self) -> tuple[str, ...]:
        """Integer decisions of the reference that lie within rounding of another, in sentences."""
        _ = self.budgets  # the perturbed runs find them
        return self.reference.near_decisions

    def _few_numbers_decide(self, budgets: Mapping[str, Mapping[str, Budget]]) -> bool:
        """Whether a tensor of few numbers lacks power, whose spread a few runs estimate badly."""
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
        """The verdict on one tensor of float64 numbers.

        beside: what it is to equal; None: the oracle's run.
        """
        # A reference that nothing is changed in gives the same in a second call.
        of = "output" if kind == SECOND and not self.exact.second else kind
        want = (beside or self.exact).kinds[of][name]
        own = self.own.kinds[of][name]
        guide: np.ndarray | None = None if beside else own
        if self.declared_nan and not beside:
            declared = self.declared_nan.get(name) if kind == "output" else None
            guide = None if declared is None else np.where(declared, want, own)
        budget = self.budgets[of][name]
        if beside and rms(self.exact.kinds[of][name]) <= budget.zero:
            budget = replace(budget, zero=math.inf)  # two runs of nothing but rounding
        return judge(want, got, guide, budget, kind=kind, name=name, transform=transform)

    def compare(
        self,
        run: Run,
        transform: str,
        passed_over: Collection[str] = (),
        beside: Run | None = None,
    ) -> Iterator[TensorReport]:
        """One report for each tensor of `run`, in the reference's names.

        beside: as for `judge_one`.

        Parameter gradients are left out where `run` has none, as no table pairs them, and those
        that the table passes over. Raises ValueError where other tensors of the reference have no
        counterpart in `run`.
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
                return  # a failure already, and no cotangent fits

    def by_torchs_rule(
        self, report: TensorReport, run: Run
    ) -> tuple[TensorReport, tuple[StandingNote, ...]]:
        """The report as it is, or without a row of padding, which torch gives no gradient."""
        kind, name, transform = report.kind, report.name, report.transform
        if kind != "gradient of parameter" or report.verdict is not Verdict.FAIL:
            return report, ()
        got, want = run.kinds[kind][name], self.exact.kinds[kind][name]
        judged = partial(self.judge_one, kind, name, transform)
        return without_padding_row(report, self._padding_rows, got, want, judged)

    @cached_property
    def _padding_rows(self) -> dict[str, int]:
        return padding_rows(self.reference.module)

    def would_fail(self, run: Run) -> bool:
        """Whether the comparison fails a tensor of `run`, a run with a bug, in the port's place."""
        return any(
            self.judge_one(kind, name, PLANTED, got).verdict is Verdict.FAIL
            for kind in COMPARED
            for name, got in run.kinds[kind].items()
        )

    @cached_property
    def has_power(self) -> bool:
        """Whether some output is known well enough to show an error of a tenth of its size."""
        reports = (
            self.judge_one("output", name, "oracle", want)
            for name, want in self.exact.kinds["output"].items()
        )
        return any(report.budget <= POWER * report.scale or not report.scale for report in reports)

    @property
    def is_judged_again(self) -> bool:
        """Whether what fails is judged by another budget, too, as `judged_again` has it."""
        return self.dtype in NARROW and not self.as_jax

    def judged_again(self, result: Result, judge: Callable[["Prepared"], Result]) -> Result:
        """In a narrow dtype, what fails is judged by the budget of what JAX stores, too.

        Both are correct: each step of a softmax and each partial sum of a bias's gradient in
        float32, as torch has them, or in the dtype, as JAX may. judge: what `result` is of.

        Where it does not pass, it is said which numbers lie within rounding of a ReLU's 0.
        """
        failed = any(report.verdict is Verdict.FAIL for report in result.tensors)
        if failed and self.is_judged_again:
            again = judge(replace(self, as_jax=True))
            pairs = zip(result.tensors, again.tensors, strict=True)
            result = replace(
                again, tensors=tuple(a if a.verdict is Verdict.PASS else b for a, b in pairs)
            )
        if not self.gradients or all(report.verdict is Verdict.PASS for report in result.tensors):
            return result
        near = findings("near-side", self.reference.near_sides)
        return replace(result, doubts=(*result.doubts, *near))

    @cached_property
    def reference_failures(self) -> tuple[Finding, ...]:
        """What is wrong with the reference itself: undeclared NaN, or its inference mode."""
        failures = []
        for name, declared in self.declared_nan.items():
            is_nan = np.isnan(wide(self.own.outputs)[name])
            if not np.array_equal(is_nan, declared):
                sentence = (
                    f"declared difference: reference {name} should be NaN at {int(declared.sum())} "
                    f"elements, as published, and is at {int(is_nan.sum())}"
                )
                failures.append(Finding("other-nan", sentence))
        for name, got in wide(self.inference).items():
            if name in self.declared_nan:
                got = np.where(self.declared_nan[name], self.exact.kinds["output"][name], got)
            report = self.judge_one("output", name, "inference", got)
            if report.verdict is Verdict.FAIL:
                told = (f"the reference in inference mode: {name}: {r}" for r in report.reasons)
                failures += findings("inference-errs", told)
        return tuple(failures)


def judge_port(
    prepared: Prepared,
    port: Port,
    transforms: Sequence[str],
    *,
    to_torch: ToTorch | None,
    beside: Port | None = None,
    paired: frozenset[str] = frozenset(),
    passed_over: frozenset[str] = frozenset(),
    failures: Sequence[Finding] = (),
    doubts: Sequence[Finding] = (),
    notes: Sequence[Finding] = (),
    backend: str | None = None,
    level: str = "measured",
    name: str = "check",
    details: Mapping[str, str] | None = None,
) -> Result:
    """Run the port under each transform and compare it, tensor by tensor.

    to_torch: None where no table pairs the parameters: their gradients are not compared.
    beside: of a port on a mesh, the one on a single device that it is compared with as well, within
        the same budgets.
    paired: dotted paths of the port's other Variables that the table pairs. passed_over:
        parameters of the reference that it passes over.
    backend: what the result says; None: the platform of JAX's default device.
    """
    reports: list[TensorReport] = []
    states = States(prepared.reference, port, prepared.exact, prepared.judge_one, to_torch, paired)
    state_findings = StateFindings(reports)
    is_finite: dict[str, bool] = {}
    with full_precision(prepared.precision is None) as (platform, pinned):
        for transform in transforms:
            run = _run(prepared, port, transform, to_torch)
            is_finite[transform] = all(np.isfinite(a).all() for a in wide(run.outputs).values())
            failed = set()
            for report in prepared.compare(run, transform, passed_over):
                by_rule, note = prepared.by_torchs_rule(report, run)
                reports.append(by_rule)
                state_findings.notes |= dict.fromkeys(note)
                failed |= {report.kind} if by_rule.verdict is Verdict.FAIL else set()
            if failed:
                again = _run(prepared, port, transform, to_torch)
                other = other_numbers(run, again, prepared.budgets, transform)
                state_findings.failures |= dict.fromkeys(other)
            state_findings.failures |= dict.fromkeys(unlike_copies(run, transform))
            if beside is not None:
                one = _run(prepared, beside, transform, to_torch)
                reports += prepared.compare(run, f"{transform}{BESIDE}", passed_over, one)
            states.compare(run, transform, state_findings, outputs_fail="output" in failed)
    failures = (*state_findings.failures, *not_finite_under_some(is_finite), *failures)
    doubts = (*doubts, *state_findings.doubts)
    notes = (*notes, *state_findings.notes, *pinned)
    if state_findings.draws and any(r.verdict is Verdict.FAIL for r in reports):
        failures = (*findings("draws-random", [state_findings.draws]), *failures)
    elif state_findings.draws:
        notes = (*notes, Finding("draws-random", state_findings.draws))
    if near := prepared.near_decisions:
        passes = all(r.verdict is Verdict.PASS for r in reports)
        kind = "near-decision"
        notes = (*notes, *(StandingNote(kind, line) for line in near)) if passes else notes
        doubts = doubts if passes else (*doubts, *findings(kind, near))
    if not prepared.gradients:
        off = Finding("gradients-off", "gradients were not compared: gradients=False")
        notes = (*notes, off)
    if reports and all(r.verdict is Verdict.PASS and r.is_zero for r in reports):
        zero = "every compared tensor is zero: other weights would give the same"
        doubts = (*doubts, Finding("all-zero", zero))
    return Result(
        dtype=prepared.dtype,
        backend=backend or platform,
        tensors=tuple(reports),
        failures=(*failures, *prepared.reference_failures),
        doubts=tuple(doubts),
        notes=tuple(notes),
        level=level,
        name=name,
        details=dict(details or {}),
    )


def _run(prepared: Prepared, port: Port, transform: str, to_torch: ToTorch | None) -> Run:
    """One run of the port, its parameters' gradients under the reference's names."""
    run = port.run(prepared.dtype, prepared.differentiated, transform)
    grads, names = to_torch(run.parameter_grads) if to_torch else {}, prepared.reference.parameters
    if names is not None:
        grads = {name: grad for name, grad in grads.items() if name in names}
    return replace(run, parameter_grads=grads)
