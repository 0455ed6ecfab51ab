"""The page of a run: what it leads with, and what it says where something is lacking."""

from dataclasses import replace

import pytest

from helpers.bench import bench_record
from jax_attn.bench.results import page as pages
from jax_attn.bench.results.page import page


@pytest.fixture(params=["attention", "a pair"])
def record(request):
    if request.param == "a pair":
        return bench_record.pair()
    return bench_record.record(bench_record.LONG[:1])


@pytest.mark.slow
def test_it_leads_with_the_fastest_and_has_every_row(record):
    text = page(record)
    assert all(row.implementation in text for row in record.rows)
    assert text.index("times the speed of") < text.index("<h2>")
    assert "Example CPU, 2 cores" in text


@pytest.mark.slow
def test_an_interrupted_run_says_so_first(record):
    said = "interrupted: these are the rows measured before that"
    text = page(replace(record, interrupted=True))
    assert text.index(said) < text.index("times the speed of")
    assert said not in page(record)


def test_without_matplotlib_it_says_what_installs_it(record, monkeypatch):
    monkeypatch.setattr(pages, "_can_draw", lambda: False)
    text = page(record)
    assert "Plots need matplotlib: pip install" in text
    assert "<img" not in text
