"""The bench's pictures: what is drawn, that it is the record's, and that it is always the same.

Where matplotlib is absent, each drawing is checked to be refused with the line that installs it.
"""

import importlib.util
import re
import sys
from dataclasses import replace

import pytest

from helpers.bench import bench_record
from jax_attn.bench.record import Status
from jax_attn.bench.results import plot
from jax_attn.bench.results.series import QUANTITIES, families, lines, shares
from jax_attn.bench.workload import MODES

RECORD = bench_record.record(bench_record.LONG[:2])
TIME, MEMORY, _ = QUANTITIES
STEMS = {
    f"{what}{mode}"
    for what in (
        *(f"{quantity.name}-attention-1x8x64-float32-" for quantity in QUANTITIES),
        "roofline-",
    )
    for mode in ("forward", "forward-backward")
}


def drawn_or_refused(record, folder):
    """The files drawn; None where nothing can be, once that was said rightly."""
    if importlib.util.find_spec("matplotlib") is not None:
        return plot.draw(record, folder)
    with pytest.raises(ModuleNotFoundError, match=r"pip install .*matplotlib"):
        plot.draw(record, folder)
    return None


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plots") / "new" / "deep"
    return drawn_or_refused(RECORD, folder), folder


@pytest.mark.slow
def test_every_figure_is_there_as_svg_and_png(drawn):
    files, folder = drawn
    if files is not None:
        assert {p.name for p in files} == {f"{s}.{kind}" for s in STEMS for kind in ("svg", "png")}
        assert sorted(folder.iterdir()) == sorted(files), "nothing half-written is left beside"
        assert all(p.read_bytes().startswith(b"\x89PNG") for p in files if p.suffix == ".png")


@pytest.mark.slow
def test_the_same_record_is_the_same_picture(drawn, tmp_path):
    files, _ = drawn
    few = replace(RECORD, rows=tuple(r for r in RECORD.rows if r.mode == "forward"))
    again = drawn_or_refused(few, tmp_path)
    for path in again or ():
        (first,) = [p for p in files if p.name == path.name]
        assert path.read_bytes() == first.read_bytes()
        assert not re.search(rb"\d{4}-\d\d-\d\d|[Mm]atplotlib v?\d", path.read_bytes())


def texts(figure) -> str:
    from matplotlib.text import Text

    return " ".join(t.get_text() for t in figure.findobj(Text))


@pytest.mark.slow
def test_the_caption_says_where_it_was_measured():
    if importlib.util.find_spec("matplotlib") is not None:
        made = plot.figures(RECORD)
        assert made.keys() == STEMS
        for name, figure in made.items():
            said = " ".join(texts(figure).split())
            for part in ("Example CPU", "jax 0.10.2", "torch 2.13.0+cpu", "threads 2"):
                assert part in said
            assert "precision highest" in said
            compiled = {r.implementation for r in RECORD.rows if r.compile_s}
            shown = compiled if name.startswith("compile") else bench_record.IMPLEMENTATIONS
            assert all(each in said for each in shown)


@pytest.mark.slow
def test_a_picture_is_dark_where_its_reader_wants_it(drawn):
    files, _ = drawn
    for path in files or ():
        if path.suffix == ".svg":
            text = path.read_text()
            (style,) = re.findall(
                r"<style>(@media \(prefers-color-scheme: dark\).*?)</style>", text
            )
            used = {*re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", text.replace(style, ""))}
            ink = {plot.INK.lower(), plot.FAINT.lower(), "#ffffff"}
            assert ink & used <= {*re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})\"", style)}


def test_without_matplotlib_the_line_that_installs_it_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install .*matplotlib"):
        plot.draw(RECORD, tmp_path / "new")
    assert not (tmp_path / "new").exists()


# ------------------------------------------------------------------ what is drawn


def test_a_line_is_an_implementation_against_length():
    (members,) = families(RECORD).values()
    found = {line.implementation: line for line in lines(RECORD, members, "forward", TIME)}
    assert found.keys() == bench_record.IMPLEMENTATIONS.keys()
    rows = {
        r.workload.T: r
        for r in RECORD.rows
        if (r.implementation, r.mode) == ("jax-attn", "forward")
    }
    assert found["jax-attn"].points == tuple(
        (T, min(rows[T].seconds), rows[T].median_s, max(rows[T].seconds)) for T in (2048, 4096)
    )
    assert found["jax-attn"].label == f"jax-attn  {rows[4096].ratio.median:.2f}×"


def test_the_first_line_is_the_highest_at_its_end():
    (members,) = families(RECORD).values()
    ends = [line.points[-1][2] for line in lines(RECORD, members, "forward", TIME)]
    assert ends == sorted(ends, reverse=True)


def test_what_was_not_measured_has_no_point():
    def change(row):
        gone = row.implementation == "keras" and row.workload.T == 4096
        return replace(row, status=Status.NOT_RUN, seconds=()) if gone else row

    fewer = replace(RECORD, rows=tuple(map(change, RECORD.rows)))
    (members,) = families(fewer).values()
    (line,) = [x for x in lines(fewer, members, "forward", TIME) if x.implementation == "keras"]
    assert [point[0] for point in line.points] == [2048]


def test_memory_that_is_not_known_or_nothing_is_not_drawn():
    for unknown in (None, 0):
        rows = tuple(replace(r, peak_bytes=unknown) for r in RECORD.rows)
        (members,) = families(RECORD).values()
        assert lines(replace(RECORD, rows=rows), members, "forward", MEMORY) == []


FAMILIES = {
    "one length is no line": (bench_record.LONG[:1], 0),
    "causal apart from full": (bench_record.LONG, 2),
    "other sizes apart": (bench_record.LAYERS, 0),
    "one in another dtype": (
        (bench_record.LONG[0], replace(bench_record.LONG[1], dtype="bfloat16")),
        0,
    ),
    "cross attention has two lengths": (
        (bench_record.LONG[0], replace(bench_record.LONG[1], S=7)),
        0,
    ),
}


@pytest.mark.parametrize("row", FAMILIES)
def test_a_figure_holds_what_differs_in_length_alone(row):
    workloads, count = FAMILIES[row]
    found = families(bench_record.record(workloads))
    assert len(found) == count
    assert all([w.T for w in ws] == sorted(w.T for w in ws) for ws in found.values())


def test_lengths_of_a_pair_are_one_line_whatever_they_read():
    (members,) = families(bench_record.pair((3, 11))).values()
    assert [w.length for w in members] == [3, 11]
    assert len({w.read for w in members}) == 2


def test_shares_are_of_this_runs_roofline():
    ((workload, rows), _) = shares(RECORD, MODES[0])
    assert workload.T == 2048
    for row, share in rows:
        assert share == row.workload.flops("forward") / row.median_s / bench_record.ROOFLINE
    assert shares(replace(RECORD, roofline={}), MODES[0]) == []
