"""Run rows of the built-in matrix and judge them."""

from collections.abc import Callable, Sequence

import jax

from jax_attn.parity.checking.judging import judge_port
from jax_attn.parity.judge.finding import findings
from jax_attn.parity.judge.result import NotRun, Result
from jax_attn.parity.run.port import Port, x64_for
from jax_attn.selfcheck.matrix.cases import Case
from jax_attn.selfcheck.matrix.designs import PORTED_DESIGNS
from jax_attn.selfcheck.matrix.kernels import kernel_of_rows
from jax_attn.selfcheck.matrix.preparation import Preparation

Doubts = Callable[[Preparation], Sequence[str]]


def run_cases(
    cases: Sequence[Case],
    backend: str = "cpu",
    implementation: str | None = None,
    *,
    doubts: Doubts,
) -> list[Result | NotRun]:
    """Judge rows of one preparation, measured on the first device of `backend`.

    doubts: returns why a row would not detect a bug that it claims to detect; the caller knows the
    bugs.

    On backends other than TPUs splash is interpreted, and its rows say so. A row that the
    implementation cannot serve has no verdict, but the reasons.
    """
    first = cases[0]
    level = "interpreted" if implementation == "splash" and backend != "tpu" else "measured"
    with x64_for(first.dtype), jax.default_device(jax.devices(backend)[0]):
        kernel = kernel_of_rows(implementation, backend, first.shape)
        preparation = Preparation(PORTED_DESIGNS[first.design], first, kernel=kernel)
        whys = [preparation.refused(case.transform) for case in cases]
        doubted = () if all(whys) else tuple(doubts(preparation))
        return [
            refusal(case, backend, why)
            if why
            else judge_case(preparation, case, doubted, backend=backend, level=level)
            for case, why in zip(cases, whys, strict=True)
        ]


def run_emulated(
    case: Case, implementation: str | None = None, *, doubts: Doubts
) -> Result | NotRun:
    """Judge one emulated row; for a vendor's kernel, return why there is no verdict.

    This does not show parity on a TPU: it runs the port's program with its products rounded as the
    TPU's matrix unit rounds them, and judges it as usual, with the budget of that rounding.
    """
    kernel = kernel_of_rows(implementation, "tpu", case.shape)
    if kernel is not None and kernel.only_on:
        why = f"{kernel.name} multiplies in a kernel of its own, whose products cannot be rounded"
        return refusal(case, "tpu", why)
    with jax.default_device(jax.devices("cpu")[0]):
        preparation = Preparation(PORTED_DESIGNS[case.design], case, "mxu", kernel)
        doubted = doubts(preparation)
        return judge_case(preparation, case, doubted, backend="tpu", level="emulated")


def refusal(case: Case, backend: str, why: str) -> NotRun:
    """Return a row that its kernel refuses on `backend`."""
    return NotRun(case.name, "both", case.dtype, case.shape, "refused", backend, error=why)


def judge_case(
    preparation: Preparation,
    case: Case,
    doubts: Sequence[str],
    *,
    port: Port | None = None,
    backend: str | None = None,
    level: str = "measured",
) -> Result:
    """Judge one case of a preparation; with doubts the verdict is never PASS.

    port: the preparation's port on a mesh, which is also compared with the one on one device.
    """
    nan = preparation.declared_nan
    declared = (f"declared: {name}, as published, is NaN there" for name in nan)
    return judge_port(
        preparation.prepared,
        port or preparation.port,
        (case.transform,),
        to_torch=preparation.design.layout.to_torch,
        beside=port and preparation.port,
        failures=preparation.weight_failures,
        doubts=findings("bug-not-seen", doubts),
        notes=findings("declared-nan", declared),
        name=case.name,
        details={
            "implementation": preparation.kernel.name if preparation.kernel else "chosen",
            "design": case.family,
            "variant": case.design.partition("/")[2],
            "mask": case.mask,
            "shape": case.shape,
            "transform": case.transform,
            "tiles": preparation.tiles(case.transform),
            "pages": preparation.pages,
        },
        backend=backend,
        level=level,
    )
