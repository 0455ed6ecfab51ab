"""The bench's tables: every row in them, the fastest first, and what each figure says."""

import csv
import io
import json
import re
from dataclasses import replace

import pytest
from rich.console import Console

from helpers.bench import bench_record
from jax_attn.bench.record import Ratio, Record, Status
from jax_attn.bench.results import table, words

RECORD = bench_record.record(bench_record.LONG[:2], interrupted=True)


def terminal(record, width=200) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(table.terminal(record, width))
    return out.getvalue()


RENDERED = {"terminal": terminal, "markdown": table.markdown}
rendered = pytest.mark.parametrize("render", RENDERED.values(), ids=RENDERED)


@rendered
def test_the_head_says_where_and_how(render):
    text = " ".join(render(RECORD).split())
    for part in (
        "Example CPU, 2 cores",
        "Python 3.11.7, jax-attn 0.1.0, jax 0.10.2",
        "threads 2, precision highest",
        "float32 400 GFLOP/s, by torch 185, by jax 400",
        "interrupted",
        "judged on 128 of 4096 queries",
    ):
        assert part in text
    assert "interrupted" not in render(replace(RECORD, interrupted=False))


@rendered
def test_a_section_has_its_rows_fastest_first(render):
    first_section = render(RECORD).split("long/2048, forward+backward")[0]
    order = sorted(
        (r for r in RECORD.rows if r.seconds and r.workload.T == 2048 and r.mode == "forward"),
        key=lambda r: r.median_s,
    )
    shown = [
        re.search(
            rf"^\W*{re.escape(r.implementation)}[ |]+{re.escape(r.kernel)} ",
            first_section,
            re.MULTILINE,
        )
        for r in order
    ]
    places = [found.start() for found in shown]
    assert len(places) == len(bench_record.IMPLEMENTATIONS)
    assert places == sorted(places)


@rendered
def test_no_row_is_dropped(render):
    text = render(RECORD)
    for row in RECORD.rows:
        assert row.implementation in text
    assert all(row.reason in text for row in RECORD.rows if row.reason)
    for status in (Status.EXCLUDED, Status.ABSENT, Status.NOT_RUN):
        assert f": {status}: " in text


@rendered
def test_what_is_noted_of_a_measured_row_is_said(render):
    noted = replace(RECORD.rows[0], reason="one head only")
    assert "one head only" in render(replace(RECORD, rows=(noted, *RECORD.rows[1:])))


@rendered
def test_what_was_compiled_stands_apart_as_the_compilers(render):
    text = " ".join(render(RECORD).split())
    apart = text.split(table.COMPILED)[1]
    assert "libtpu 0.0.42" in apart
    assert "8.59 GFLOP useful, 8.96 as XLA counts" in apart
    assert table.COMPILED not in render(replace(RECORD, compiled=()))


@rendered
def test_a_run_that_measured_nothing_still_says_why(render):
    nothing = replace(RECORD, rows=bench_record.unmeasured(bench_record.LONG[0], "forward"))
    text = render(nothing)
    assert all(row.reason in text for row in nothing.rows)


@pytest.mark.parametrize("width", [80, 100, 120, 200])
def test_a_narrow_terminal_keeps_name_verdict_time_and_speed(width):
    text = terminal(RECORD, width)
    assert max(map(len, text.splitlines())) <= width
    lines = text.splitlines()
    for row in (r for r in RECORD.rows if r.seconds):
        name, *cells = (c.cell(row, RECORD) for c in table.COLUMNS if c.rank == 0)
        assert any(
            line.strip().startswith(f"{name} ") and all(f" {cell}" in line for cell in cells)
            for line in lines
        ), (name, cells)
    said = " ".join(text.split())
    (section, *_) = table.sections(RECORD)
    for column in table.columns(section, RECORD):  # in the table, or named as left out
        assert all(word in said for word in column.title.split())
    assert ("left out on a narrow terminal" in said) == (width < 200)


def test_csv_has_every_measurement():
    first, *rows = csv.reader(io.StringIO(table.csv(RECORD)))
    assert first == list(table.CSV_COLUMNS)
    assert len(rows) == len(RECORD.rows)
    for line, row in zip(rows, RECORD.rows, strict=True):
        cells = dict(zip(first, line, strict=True))
        assert cells["implementation"] == row.implementation
        assert cells["reason"] == row.reason
        assert cells["seconds"] == ("" if row.median_s is None else repr(row.median_s))


def test_markdown_tables_are_whole():
    rows = [line for line in table.markdown(RECORD).splitlines() if line.startswith("|")]
    sections = 4
    assert len(rows) == sections * (2 + len(bench_record.IMPLEMENTATIONS))
    (width,) = {len(table.columns(section, RECORD)) for section in table.sections(RECORD)}
    assert {row.count("|") for row in rows} == {width + 1}


def cells(row, record=RECORD) -> dict[str, str]:
    (section,) = table.sections(replace(record, rows=(row,)))
    return {
        re.sub(r"\s", " ", column.title): column.cell(row, record)
        for column in table.columns(section, record)
    }


def test_the_figures_of_a_row():
    row = replace(
        bench_record.row(bench_record.LONG[0], "forward", "jax-attn"),
        seconds=(0.03, 0.02, 0.04),
        ratio=Ratio(1.7, 1.6, 1.8),
        peak_bytes=3 * 2**20,
        compiler_bytes=2**19,
    )
    assert cells(row) == {
        "implementation": "jax-attn",
        "kernel": "blocked",
        "verdict": "PASS",
        "error/ torch's": "1.08",
        "time": "30.0 ms",
        "speed [95%]": "1.70 [1.60, 1.80]",
        "": "faster",
        "GFLOP/s": "286",  # 4 · 8 · 2048² · 64 in 30 ms
        "of GEMM": "72%",
        "compile": "400 ms",
        "first call": words.seconds(row.first_call_s),
        "peak MiB": "3.00",
        "compiler's MiB": "0.500",
    }


def test_a_step_has_tokens_and_its_cache_in_the_place_of_products():
    w = replace(bench_record.STEPS[0], B=3, S=1000, room=4096, K=2)
    row = replace(bench_record.step(w, "jax-attn"), seconds=(0.003, 0.002, 0.004), ratio=None)
    found = cells(row)
    assert found["tokens/s"] == "1,000"  # 3 in 3 ms
    assert found["cache GB/s"] == "1.02"  # 2 · 3 · 1000 · 2 · 64 numbers of 4 bytes in 3 ms
    assert found["cache MiB"] == "12.0"  # 4096 places of the same
    assert not {"GFLOP/s", "of GEMM"} & found.keys()
    many = replace(row, workload=replace(w, T=1000), mode="prefill")
    assert {"GFLOP/s", "of GEMM", "tokens/s", "cache MiB"} <= cells(many).keys()
    assert "cache GB/s" not in cells(many)
    assert not {"tokens/s", "cache GB/s", "cache MiB"} & cells(RECORD.rows[0]).keys()


def test_dispatch_stands_beside_the_time_where_the_device_is_another():
    row = replace(RECORD.rows[0], dispatch=(2e-6, 3e-6, 4e-6))
    assert "dispatch" not in cells(row)
    on_gpu = replace(RECORD, settings=RECORD.settings | {"device": "gpu"})
    assert cells(row, on_gpu)["dispatch"] == "3.00 µs"


def test_the_legend_is_of_the_columns_there():
    step, call = table.legend(bench_record.steps()), table.legend(RECORD)
    assert "cache GB/s: keys" in step
    assert "of GEMM" not in step
    assert "of GEMM" in call
    assert "cache GB/s: keys" not in call


@pytest.mark.slow
def test_a_record_keeps_what_caches_and_devices_add_and_reads_what_has_none():
    record = bench_record.steps()
    rows = (replace(record.rows[0], dispatch=(1e-6,)), *record.rows[1:])
    again = Record.from_json(replace(record, rows=rows).to_json())
    assert again.rows == rows
    plain = json.loads(bench_record.record().to_json())
    for row in plain["rows"]:
        for name in ("cache_bytes", "dispatch", "dispatch_s", "tokens_per_s", "cached_bytes_per_s"):
            del row[name]
        del row["workload"]["room"]
    assert Record.from_json(json.dumps(plain)) == bench_record.record()


def test_what_is_not_known_is_a_dash():
    row = replace(
        bench_record.row(bench_record.LONG[0], "forward", "jax-attn"),
        kernel="",
        **dict.fromkeys(("verdict", "error", "compile_s", "first_call_s")),
        **dict.fromkeys(("peak_bytes", "compiler_bytes", "ratio")),
    )
    found = cells(row, replace(RECORD, roofline={}))
    known = {name for name, said in found.items() if said != words.DASH}
    assert known == {"implementation", "time", "GFLOP/s"}


def test_the_baseline_is_named_rather_than_compared_with_itself():
    row = bench_record.row(bench_record.LONG[0], "forward", "sdpa")
    assert cells(row)[""] == "baseline"


SECONDS = {
    12.34: "12.3 s",
    1: "1.00 s",
    0.99999: "1.00 s",
    0.0424: "42.4 ms",
    9.997e-4: "1.00 ms",
    2.5e-5: "25.0 µs",
    3e-8: "30.0 ns",
    1234: "1,230 s",
}


@pytest.mark.parametrize("given", SECONDS)
def test_seconds_are_readable(given):
    assert words.seconds(given) == SECONDS[given]


DIGITS = {0: "0.00", 0.05: "0.0500", 7: "7.00", 65536: "65,500", float("inf"): "∞", None: "–"}


@pytest.mark.parametrize("given", DIGITS)
def test_digits_never_need_an_exponent(given):
    assert words.digits(given) == DIGITS[given]
