"""The built-in matrix: what it covers, what its rows claim, and a sample of them run.

`jax-attn verify` runs them all.
"""

from collections import Counter
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

import torch_ref
from helpers.parity.findings import kinds, sentences
from jax_attn.attention.dispatch import KERNELS
from jax_attn.attention.kernels import cudnn
from jax_attn.dtypes import DTYPES
from jax_attn.parity.judge.compare import Verdict
from jax_attn.parity.run import TRANSFORMS
from jax_attn.selfcheck.matrix import run_rows
from jax_attn.selfcheck.matrix.cases import TILE_EDGES, Case
from jax_attn.selfcheck.matrix.designs import PORTED_DESIGNS
from jax_attn.selfcheck.matrix.masks import MASKS
from jax_attn.selfcheck.matrix.preparation import Preparation
from jax_attn.selfcheck.matrix.rows import (
    FACTORS,
    REPEATS,
    crossed,
    default,
    emulated,
    emulated_by_default,
    matrix,
    pairs,
    published,
)
from jax_attn.selfcheck.matrix.run_rows import judge_case, run_cases
from jax_attn.selfcheck.power.catalogue import BUGS
from jax_attn.selfcheck.power.trials import doubts, kills

ROWS = crossed()
REACHABLE = {
    pair
    for design, of in FACTORS.items()
    for levels in product(of.dtypes, of.masks, of.shapes, TRANSFORMS)
    for pair in pairs(Case(design, *levels))
}
"""Every pair of levels that some row could have."""
SHAPES = {shape for factors in FACTORS.values() for shape in factors.shapes}


def test_every_pair_of_levels_that_can_meet_meets():
    met = set().union(*map(pairs, ROWS))
    assert REACHABLE - met == set()
    # The factors themselves: nothing of the specification is out of reach.
    levels = {frozenset(p) for p in ((("dtype", d), ("mask", m)) for d in DTYPES for m in MASKS)}
    levels |= {frozenset((("mask", m), ("transform", t))) for m in MASKS for t in TRANSFORMS}
    levels |= {frozenset((("shape", s), ("transform", t))) for s in SHAPES for t in TRANSFORMS}
    levels |= {frozenset((("shape", s), ("dtype", d))) for s in SHAPES for d in DTYPES}
    assert levels <= met


def test_the_default_rows_meet_each_pair_each_variant_and_each_shape():
    """At least 100 rows, all of them among those of the whole matrix."""
    rows = default()
    assert len(rows) >= 100
    assert set(rows) <= set(matrix())
    assert set().union(*map(pairs, rows)) >= REACHABLE
    assert {row.design for row in rows} == FACTORS.keys()
    assert {row.shape for row in rows} == SHAPES | set(TILE_EDGES)


def test_each_published_design_is_emulated_once_by_default():
    """As causal where it takes a mask; the two of them by --all."""
    rows = emulated_by_default()
    assert [row.design for row in rows] == list(published())
    assert set(rows) < set(emulated())
    assert {row.design for row in rows if row.mask == "none"} == {"fused_mha", "plain_mha"}


def test_each_variant_that_takes_masks_meets_one_that_hides_keys_by_default():
    not_hiding = ("none", "bias", "dropout")
    hiding = {d for d, factors in FACTORS.items() if set(factors.masks) - {*not_hiding}}
    assert hiding <= {row.design for row in default() if row.mask not in not_hiding}


@pytest.mark.parametrize(
    ("level", "rows"),
    [
        *((level, default) for level in ("remat", "token", "empty_row", "float16")),
        ("token", crossed),
    ],
)
def test_without_a_level_the_rows_would_miss_pairs(level, rows):
    fewer = [row for row in rows() if level not in (row.transform, *row.preparation)]
    assert REACHABLE - set().union(*map(pairs, fewer))


def test_each_combination_is_run_under_two_transforms_by_all():
    """Those beside are of `default`, which covers pairs with other dtypes, too."""
    count = Counter(row.preparation for row in ROWS)
    combinations = {row.preparation[:3] for row in ROWS}
    twice = {preparation[:3] for preparation, times in count.items() if times >= REPEATS}
    dealt = {(d, "float32", m) for d, factors in FACTORS.items() for m in factors.masks}
    assert dealt <= twice <= combinations


def test_there_are_at_least_300_rows_of_distinct_names_on_at_most_eight_small_shapes():
    assert len(ROWS) >= 300
    assert len({row.name for row in matrix()}) == len(matrix())
    assert {row.shape for row in ROWS} == SHAPES
    assert len(SHAPES) <= 8


def test_every_published_design_is_run_in_every_dtype():
    run = {(row.family, row.dtype) for row in ROWS}
    assert run == {(design, dtype) for design in torch_ref.DESIGNS for dtype in DTYPES}
    assert FACTORS.keys() == PORTED_DESIGNS.keys()


def test_the_seeds_own_sizes_are_run_by_the_seeds_own_designs():
    run = {(row.family, row.shape) for row in ROWS}
    assert {
        ("weights_mha", "seed000"),
        ("fused_mha", "seed001"),
        ("masked_mha", "seed002"),
        ("mqa", "seed002"),
        ("plain_mha", "seed003"),
        ("torch_mha", "seed003"),
    } <= run


def distinct(rows, key) -> list[Case]:
    """The first row of each `key`."""
    return list({key(row): row for row in reversed(rows)}.values())


def pytest_generate_tests(metafunc):
    """A row of each published design; --long and `jax-attn power`: of each variant, too."""
    if "claiming" in metafunc.fixturenames:
        long = metafunc.config.getoption("--long")
        rows = distinct(ROWS, lambda c: c.design if long else c.family)
        metafunc.parametrize("claiming", rows, ids=lambda c: c.name)


@pytest.mark.slow
def test_every_row_of_a_design_claims_something_and_kills_all_of_it(claiming):
    found = kills(Preparation(PORTED_DESIGNS[claiming.design], claiming))
    assert found
    assert [kill.bug for kill in found if not kill.killed] == []


def test_a_bug_that_survives_makes_its_row_inconclusive(monkeypatch):
    """One key: no scale could show. Claimed all the same, the row has not shown it."""
    case = Case("plain_mha", "float32", "none", "token", "jit")
    scale = BUGS["scale 1% too large"]
    assert run_cases([case], doubts=doubts)[0].verdict is Verdict.PASS
    monkeypatch.setitem(BUGS, "scale 1% too large", replace(scale, claim=lambda *_: True))
    (result,) = run_cases([case], doubts=doubts)
    assert result.verdict is Verdict.INCONCLUSIVE
    (doubt,) = sentences(result, "bug-not-seen")
    assert "blind: would not have seen 'scale 1% too large'" in doubt


def cheapest(rows) -> list[Case]:
    """For each mask and each dtype one row, on a small shape, jitted."""
    small = [c for c in rows if c.shape in ("cross", "square", "prime") and c.transform == "jit"]
    return sorted(
        {*distinct(small, lambda c: c.mask), *distinct(small, lambda c: c.dtype)},
        key=lambda c: c.name,
    )


@pytest.mark.slow
@pytest.mark.parametrize("case", cheapest(ROWS), ids=lambda c: c.name)
def test_a_row_of_each_mask_and_each_dtype_passes(case):
    (result,) = run_cases([case], doubts=doubts)
    assert result.verdict is Verdict.PASS, str(result)
    assert result.backend == "cpu"
    assert result.level == "measured"


@pytest.mark.slow
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_row_of_each_transform_passes_and_compares_every_tensor(transform):
    case = Case("gqa", "float32", "bias", "cross", transform)
    (result,) = run_cases([case], doubts=doubts)
    assert result.verdict is Verdict.PASS, str(result)
    kinds = Counter(t.kind for t in result.tensors)
    assert kinds == {"output": 2, "gradient of input": 4, "gradient of parameter": 8}


@pytest.mark.slow
def test_a_declared_nan_is_checked_on_both_sides():
    """masked_mha gives NaN where a row may attend to nothing; the port gives out_proj's bias."""
    case = Case("masked_mha", "float32", "empty_row", "prime", "jit")
    row = Preparation(PORTED_DESIGNS["masked_mha"], case)
    assert row.declared_nan["output"].any()
    result = judge_case(row, case, doubts(row))
    assert result.verdict is Verdict.PASS, str(result)
    assert sentences(result, "declared-nan") == ["declared: output, as published, is NaN there"]

    fewer = Preparation(PORTED_DESIGNS["masked_mha"], case)
    fewer.__dict__["declared_nan"] = {"output": np.zeros_like(row.declared_nan["output"])}
    result = judge_case(fewer, case, doubts(fewer))
    assert result.verdict is Verdict.FAIL
    assert result.failures[0].kind == "other-nan"
    assert "output should be NaN at 0 elements" in result.failures[0]


def test_a_nan_that_nobody_declared_fails():
    case = Case("masked_mha", "float32", "empty_row", "prime", "jit")
    undeclared = replace(PORTED_DESIGNS["masked_mha"], nan_rows=False)
    row = Preparation(undeclared, case)
    result = judge_case(row, case, doubts(row))
    assert result.verdict is Verdict.FAIL
    assert "reference-not-finite" in kinds(result, "failure", "doubt")


def test_a_kernel_that_refuses_one_transform_has_verdicts_under_the_others(monkeypatch):
    def refusals(call):
        return ["it serves no mapped call"] if cudnn.is_mapped(call) else []

    kernel = replace(KERNELS["dense"], refusals=refusals)
    monkeypatch.setattr(run_rows, "kernel_of_rows", lambda *_: kernel)
    cases = [Case("gqa", "float32", "causal", "square", each) for each in ("jit", "vmap", "grad")]
    rows = run_cases(cases, "cpu", "dense", doubts=lambda _: ())
    assert [getattr(row, "verdict", None) for row in rows] == [Verdict.PASS, None, Verdict.PASS]
    assert (rows[1].level, rows[1].error[-24:]) == ("refused", "it serves no mapped call")
