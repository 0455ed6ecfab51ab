"""Run rows of the built-in matrix and judge them."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax

from jax_attn.attention import dispatch
from jax_attn.attention.kernels import blocked
from jax_attn.attention.kernels.tile import Sizes
from jax_attn.nn import cache
from jax_attn.parity.judge.result import Result
from jax_attn.parity.matrix.cases import Case
from jax_attn.parity.matrix.designs import DESIGNS
from jax_attn.parity.matrix.row import Row


@contextlib.contextmanager
def x64_for(dtype: str) -> Iterator[None]:
    """JAX's x64 mode where `dtype` needs it, and only there."""
    with jax.enable_x64(dtype == "float64"):
        yield


# Smaller than the axes of the matrix, but for a single token's, and dividing few of them: rows
# have several tiles, and tiles at the edges.
_TILE, _PAGE = {"T": 3, "S": 4}, 5


@contextlib.contextmanager
def several_tiles() -> Iterator[None]:
    """The blocked kernel in tiles, and caches in pages, so small that rows have more than one.

    Several tokens a cache then writes by the page.
    """

    def small(call) -> Sizes:
        return Sizes(1, min(call.T, _TILE["T"]), min(call.S, _TILE["S"]))

    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (blocked, "tile_sizes", small),
            (cache, "FIRST_PAGE", _PAGE),
            (cache, "FEW_TOKENS", 1),
            (cache, "QUERY_TILE", 2),
        ):
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Splash, by Pallas's interpreter, on any platform."""
    kernel = dispatch.KERNELS["splash"]
    run = partial(kernel.run, interpret=True)
    dispatch.KERNELS["splash"] = replace(kernel, run=run, only_on=None)
    try:
        yield
    finally:
        dispatch.KERNELS["splash"] = kernel


def run_cases(
    cases: Sequence[Case], backend: str = "cpu", implementation: str | None = None
) -> list[Result | dict[str, Any]]:
    """The verdicts on rows of one preparation, measured on the first device of `backend`.

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
        return [judge_row(row, case, backend=backend, level=level) for case in cases]


def refusal(case: Case, backend: str, why: str) -> dict[str, Any]:
    """A row that was not run, as what has no verdict is told."""
    told = {"design": case.name, "direction": "both", "level": "refused", "target": backend}
    return told | {"dtype": case.dtype, "shape": case.shape, "error": why}


def judge_row(row: Row, case: Case, **identity: str) -> Result:
    """The verdict on `case`, one of those that `row` serves."""
    return row.prepared.judge(
        row.bound,
        (case.transform,),
        to_torch=row.design.layout.to_torch,
        failures=row.weight_failures,
        doubts=row.blind,
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
