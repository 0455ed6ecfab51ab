"""Rows past the edges of the shipped tiles and pages: which tiles rows run in, and bugs there."""

import json
from collections.abc import Callable
from dataclasses import replace

import jax
import pytest

from jax_attn.attention.kernels.tile import Tile
from jax_attn.parity.judge.compare import Verdict
from jax_attn.report.documents import as_json, summary_lines
from jax_attn.selfcheck.matrix.cases import TILE_EDGES, Case
from jax_attn.selfcheck.matrix.designs import PORTED_DESIGNS
from jax_attn.selfcheck.matrix.kernels import kernel_of_rows
from jax_attn.selfcheck.matrix.preparation import Preparation
from jax_attn.selfcheck.matrix.rows import at_tile_edges, crossed
from jax_attn.selfcheck.matrix.run_rows import run_cases
from jax_attn.selfcheck.power.trials import claimed, doubts

KEYS, *OTHERS = at_tile_edges()
SMALL = Case("gqa", "float32", "none", "prime", "jit")
CACHED = Case("gqa/cached", "float32", "causal", "square", "jit")
LAST_TILE, LAST_OF_PAGE = "the last tile of keys dropped", "the last token of a page forgotten"


def prepared(case: Case, implementation: str | None = None) -> Preparation:
    kernel = kernel_of_rows(implementation, "cpu", case.shape)
    return Preparation(PORTED_DESIGNS[case.design], case, kernel=kernel)


def pytest_generate_tests(metafunc):
    """A row over the keys, one of each small shape; --long and `jax-attn verify` run all."""
    long = metafunc.config.getoption("--long")
    if "at_edge" in metafunc.fixturenames:
        rows = [KEYS, *OTHERS] if long else [KEYS]
        metafunc.parametrize("at_edge", rows, ids=lambda case: case.name)
    if "small" in metafunc.fixturenames:
        key = "design shape" if long else "shape"
        metafunc.parametrize("small", small_rows(*key.split()), ids=lambda case: case.name)


def no_bugs(row: Preparation) -> tuple[str, ...]:
    return ()


@pytest.mark.slow
def test_a_row_past_the_edges_passes_and_sees_every_bug_that_it_claims(at_edge):
    (result,) = run_cases([at_edge], doubts=doubts)
    assert result.verdict is Verdict.PASS, str(result)
    assert "shipped" in result.details["tiles"] + result.details["pages"]


SEVERAL = {
    "long_keys": "shipped: 2 × 37 × 208 of 2 × 37 × 1031",
    "long_queries": "shipped: 2 × 520 × 37 of 2 × 1031 × 37",
    "long_band": "shipped: 2 × 176 × 136 of 2 × 521 × 263",
    "many_heads": "shipped: 3 × 257 × 67 of 6 × 257 × 67",
}


@pytest.mark.parametrize("case", [KEYS, *OTHERS], ids=lambda case: case.name)
def test_each_edge_is_crossed_by_a_row_that_claims_bugs_there(case):
    row = prepared(case)
    assert row.tiles("jit") == SEVERAL.get(case.shape, "none: attention to a cache, by its pages")
    assert row.pages == ("shipped: 512 + 11 places" if case.design == "gqa/cached" else "")
    assert (LAST_TILE in claimed(row)) == (case.shape in ("long_keys", "long_band", "two_pages"))
    assert (LAST_OF_PAGE in claimed(row)) == (case.shape == "two_pages")


def test_shapes_that_cross_edges_are_those_of_the_rows_that_do():
    assert {case.shape for case in at_tile_edges()} == set(TILE_EDGES)
    assert not {case.shape for case in crossed()} & set(TILE_EDGES)


def small_rows(*key: str) -> list[Case]:
    """One of each: design and shape are what decides on the kernel."""
    rows = [case for case in crossed() if case.dtype == "float32"]
    return [*{tuple(getattr(case, k) for k in key): case for case in rows}.values()]


def test_no_row_on_a_small_shape_runs_in_the_shipped_tiles(small):
    """A row of each shape; with --long of each design, too."""
    row = prepared(small)
    assert row.tiles("jit").partition(":")[0] == "none"
    assert row.tiles("jit") == row.traced("jit")[1]


def test_rows_on_small_shapes_that_insist_on_blocked_run_in_small_tiles():
    assert prepared(SMALL, "blocked").tiles("jit") == "small: 1 × 3 × 4 of 2 × 13 × 13"
    assert prepared(KEYS, "blocked").tiles("jit") == SEVERAL["long_keys"]


@pytest.fixture
def last_partial_tile_dropped(monkeypatch):
    """The blocked kernel counts whole tiles of keys alone."""
    right: Callable = Tile.columns

    def wrong(tile: Tile):
        columns = right(tile)
        return columns._replace(seen=columns.whole)

    jax.clear_caches()
    monkeypatch.setattr(Tile, "columns", wrong)
    yield
    jax.clear_caches()


@pytest.mark.slow
@pytest.mark.usefixtures("last_partial_tile_dropped")
def test_a_dropped_partial_tile_fails_a_row_past_the_edge_and_passes_on_small_shapes():
    (long,) = run_cases([KEYS], doubts=no_bugs)
    assert long.verdict is Verdict.FAIL
    (small,) = run_cases([SMALL], doubts=no_bugs)
    assert small.verdict is Verdict.PASS, str(small)


@pytest.mark.slow
def test_a_report_says_which_tiles_and_pages_each_row_ran_in():
    (one,) = run_cases([SMALL], doubts=no_bugs)
    row = prepared(CACHED)
    other = replace(one, details=one.details | {"tiles": row.tiles("jit"), "pages": row.pages})
    found = [one, other]
    small, cached = json.loads(as_json(found, {}, []))["cases"]
    assert (small["tiles"], small["pages"]) == ("none: dense writes all scores out", "")
    assert cached["tiles"] == "none: attention to a cache, by its pages"
    assert cached["pages"] == "small: 8 places"
    assert {"tiles: 2 none", "pages: 1 small"} <= set(summary_lines(found, []))
