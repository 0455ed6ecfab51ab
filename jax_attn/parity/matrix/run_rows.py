"""Run rows of the built-in matrix and judge them."""

import contextlib
from collections.abc import Callable, Sequence

import jax

from jax_attn.parity.judge.not_run import NotRun
from jax_attn.parity.judge.result import Result
from jax_attn.parity.matrix.cases import Case
from jax_attn.parity.matrix.designs import DESIGNS
from jax_attn.parity.matrix.row import Row
from jax_attn.parity.run.jax_settings import interpreted, several_tiles, x64_for

Doubts = Callable[[Row], Sequence[str]]


def run_cases(
    cases: Sequence[Case],
    backend: str = "cpu",
    implementation: str | None = None,
    *,
    doubts: Doubts,
) -> list[Result | NotRun]:
    """The verdicts on rows of one preparation, measured on the first device of `backend`.

    doubts: why the row would not see what it claims to; whoever knows the bugs tells.

    Away from TPUs splash is interpreted, and its rows say so. A row that the implementation
    cannot serve has no verdict, but an account of why.
    """
    first = cases[0]
    interpret = implementation == "splash" and backend != "tpu"
    level = "interpreted" if interpret else "measured"
    with (
        x64_for(first.dtype),
        jax.default_device(jax.devices(backend)[0]),
        several_tiles(),
        interpreted() if interpret else contextlib.nullcontext(),
    ):
        row = Row(DESIGNS[first.design], first, implementation=implementation)
        if why := row.refused:
            return [refusal(case, backend, why) for case in cases]
        doubted = tuple(doubts(row))
        return [judge_row(row, case, doubted, backend=backend, level=level) for case in cases]


def refusal(case: Case, backend: str, why: str) -> NotRun:
    """A row that its kernel refuses on `backend`."""
    return NotRun(case.name, "both", case.dtype, case.shape, "refused", backend, error=why)


def judge_row(row: Row, case: Case, doubts: Sequence[str], **identity: str) -> Result:
    """The verdict on `case`, one of those that `row` serves; with doubts none is a PASS."""
    return row.prepared.judge(
        row.bound,
        (case.transform,),
        to_torch=row.design.layout.to_torch,
        failures=row.weight_failures,
        doubts=doubts,
        notes=tuple(f"declared: {n}, as published, is NaN there" for n in row.declared_nan),
        name=case.name,
        details={
            "implementation": row.implementation or "chosen",
            "design": case.family,
            "variant": case.design.partition("/")[2],
            "mask": case.mask,
            "shape": case.shape,
            "transform": case.transform,
        },
        **identity,
    )
