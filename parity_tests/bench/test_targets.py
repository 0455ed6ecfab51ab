"""The docs' table of speed targets: that it is the evidence's, and that each can be missed."""

import importlib.util
import re
from dataclasses import replace

import fill_docs
import measuring
import numpy as np
import pytest
import targets

from helpers.bench import bench_record
from jax_attn.bench.results.series import QUANTITIES, families, lines

RECORD = bench_record.record()
OURS = "jax-attn"
CORE = {T: targets.attention(T) for T in targets.LENGTHS}


def changed(record, fits, mode, name=OURS, **to):
    """The record with other figures in the rows of one implementation; times are factors."""

    def change(row):
        if not (fits(row.workload) and row.mode == mode and row.implementation == name):
            return row
        factor = to.get("slower", 1.0)
        figures = {k: v for k, v in to.items() if k != "slower"}
        return replace(row, seconds=tuple(factor * s for s in row.seconds), **figures)

    return replace(record, rows=tuple(map(change, record.rows)))


def met(record) -> list[str]:
    return [target.met({"run": record}) for target in targets.TARGETS]


def test_a_record_that_meets_them_all_says_so():
    assert met(RECORD) == [*["yes"] * 4, "–", *["yes"] * 5]


FORWARD, BOTH = targets.FORWARD, targets.BOTH
CAUSAL = {T: targets.attention(T, is_causal=True) for T in targets.LENGTHS}
MISSED = {
    # what is changed in the record: the targets that are then missed
    "SDPA twice as fast": ((CORE[4096], FORWARD, "sdpa", {"slower": 0.45}), {0}),
    "ours is slow at one length": ((CORE[2048], FORWARD, OURS, {"slower": 2.6}), {0, 3}),
    "SDPA's causal kernel as fast": ((CAUSAL[2048], FORWARD, "sdpa", {"slower": 0.45}), {1}),
    "a slow backward pass": ((CORE[8192], BOTH, OURS, {"slower": 2.1}), {2}),
    "jax.nn much faster": ((CORE[8192], FORWARD, "jax.nn", {"slower": 0.35}), {3}),
    "causal saves nothing": ((CAUSAL[8192], FORWARD, OURS, {"slower": 2.1}), {1, 5}),
    "a peer is faster at one of the workloads": (
        (CAUSAL[4096], BOTH, "keras", {"slower": 0.05}),
        {6},
    ),
    "a small layer that a peer is faster at": (
        (targets.layer(2, 10, 512), BOTH, "equinox", {"slower": 0.05}),
        {6, 7},
    ),
    "a large layer that SDPA is faster at": (
        (targets.layer(8, 512, 512), FORWARD, "sdpa", {"slower": 0.5}),
        {8},
    ),
    "twice the error": ((CORE[4096], BOTH, OURS, {"error": 2e-7}), {9}),
}


@pytest.mark.slow
@pytest.mark.parametrize("row", MISSED)
def test_each_target_can_be_missed(row):
    (fits, mode, name, to), missed = MISSED[row]
    other = changed(RECORD, fits, mode, name, **to)
    found = met(other)
    assert {i for i, said in enumerate(found) if said == "missed"} == missed
    assert "missed" in targets.table({"other": other})


def test_every_target_but_the_one_stated_is_shown_to_be_missed():
    shown = set().union(*(missed for _, missed in MISSED.values()))
    stated = {i for i, target in enumerate(targets.TARGETS) if target.bound[1] is None}
    assert shown == set(range(len(targets.TARGETS))) - stated


@pytest.mark.slow
def test_what_was_not_measured_is_not_met():
    nothing = replace(RECORD, rows=())
    assert set(met(nothing)) == {"not measured"}
    without_jax_nn = replace(
        RECORD, rows=tuple(r for r in RECORD.rows if r.implementation != "jax.nn")
    )
    assert met(without_jax_nn)[3] == "not measured"
    assert "8192: – (no jax.nn)" in targets.table({"without": without_jax_nn})


# --- decoding -------------------------------------------------------------------------------------

STEPS = bench_record.steps()
STEP, DECODE = targets.step, targets.DECODE


def decoding_met(record) -> list[str]:
    return [target.met({"run": record}) for target in targets.DECODING]


def test_steps_that_meet_their_targets_say_so():
    assert decoding_met(STEPS) == ["yes"] * 5
    text = targets.table({"run": STEPS}, targets.DECODING)
    assert "| B=1: 64.0 MiB to 4.00 MiB<br>B=8: 512 MiB to 32.0 MiB | yes |" in text


STEPS_MISSED = {
    "a multi-query step hardly faster": ((STEP(8, 1), OURS, {"slower": 1.4}), {0, 3}),
    "a cache as if each group had its own": (
        (STEP(1, 1), OURS, {"cache_bytes": 5 * 2**20}),
        {1},
    ),
    "SDPA as fast": ((STEP(1, 16), "sdpa", {"slower": 0.5}), {2}),
    "SDPA nearly as fast, multi-query": ((STEP(1, 1), "sdpa", {"slower": 0.8}), {3}),
    "work by the room there is": ((STEP(1, 16, 512, 32768), OURS, {"slower": 1.3}), {4}),
}


@pytest.mark.parametrize("row", STEPS_MISSED)
def test_each_target_of_decoding_can_be_missed(row):
    (fits, name, to), missed = STEPS_MISSED[row]
    found = decoding_met(changed(STEPS, fits, DECODE, name, **to))
    assert {i for i, said in enumerate(found) if said == "missed"} == missed


def test_steps_that_were_not_measured_meet_nothing():
    assert set(decoding_met(RECORD)) == {"not measured"}
    assert set(met(STEPS)) == {"not measured"}


def everywhere(**to):
    return replace(RECORD, rows=tuple(replace(row, **to) for row in RECORD.rows))


NO_EVIDENCE = {
    "an interrupted run": replace(RECORD, interrupted=True),
    "rows that nobody could judge": everywhere(verdict="INCONCLUSIVE"),
    "another dtype": replace(
        RECORD,
        rows=tuple(
            replace(row, workload=replace(row.workload, dtype="bfloat16")) for row in RECORD.rows
        ),
    ),
}


@pytest.mark.parametrize("row", NO_EVIDENCE)
def test_what_is_no_evidence_meets_nothing(row):
    assert set(met(NO_EVIDENCE[row])) == {"not measured"}


@pytest.mark.slow
@pytest.mark.parametrize("peer", targets.LAYER_PEERS)
def test_the_fastest_peer_is_known_only_where_each_was_timed(peer):
    rows = tuple(r for r in RECORD.rows if not (r.workload.layer and r.implementation == peer))
    lacking = replace(RECORD, rows=rows)
    assert met(lacking)[6] == met(lacking)[7] == "not measured"
    assert f"– (no {peer})" in targets.table({"lacking": lacking})


def only(T: int, **changed):
    return replace(RECORD, rows=tuple(r for r in RECORD.rows if r.workload.T == T), **changed)


@pytest.mark.slow
def test_each_figure_is_of_the_first_run_that_has_it():
    again = changed(only(2048), CORE[2048], FORWARD, slower=0.5)
    runs = {"again": again, "whole": RECORD}
    first, *others = targets.TARGETS[0].first_figures(runs)
    assert first == targets.TARGETS[0].figures(again)[0]
    assert others == targets.TARGETS[0].figures(RECORD)[1:]
    assert [line.split(":")[0] for line in targets.table(runs).split("\n")[-2:]] == [
        "- again",
        "- whole",
    ]

    def times(record):
        return {T: targets.rows(record, CORE[T], FORWARD)[OURS].median_s for T in CORE}

    whole = times(RECORD)
    assert times(targets.merged(runs)) == whole | {2048: whole[2048] / 2}


def test_rounds_that_a_slow_peer_left_do_not_count():
    rows = (
        replace(r, seconds=r.seconds[:5]) if r.implementation in targets.PEERS else r
        for r in RECORD.rows
    )
    assert met(replace(RECORD, rows=tuple(rows))) == met(RECORD)


def test_what_has_no_rounds_in_common_is_redrawn_apart():
    drift = tuple(np.random.default_rng(0).uniform(1, 9, 7))
    fast = replace(RECORD.rows[0], seconds=drift)
    found = targets.slower("", replace(fast, seconds=tuple(2 * t for t in drift)), fast, apart=True)
    assert found.value == pytest.approx(2)
    low, high = map(float, re.findall(r"[\d.]+", found.text)[1:])
    assert high / low > 1.5, "together it would be 2 to 2"


@pytest.mark.slow
def test_the_table_names_machine_and_versions():
    text = targets.table({"run": RECORD})
    assert "Example CPU, 2 cores" in text
    assert "torch 2.13.0+cpu" in text


@pytest.mark.slow
def test_the_docs_have_the_table_and_a_plot_that_is_there():
    kept = fill_docs.kept()
    text = (measuring.ROOT / fill_docs.REFERENCE / "speed.md").read_text()
    assert fill_docs.bench(kept) in text
    if kept:
        assert f"]({measuring.beside(fill_docs.PLOT)})" in text
        assert not differs(targets.merged(kept))


def shown_in(record) -> list:
    """The workloads that the plot is of."""
    return [
        found
        for key, found in families(record).items()
        if (key.layer, key.B, key.N, key.H, key.is_causal) == (False, 1, 8, 64, False)
    ]


def differs(record) -> set[str]:
    """Words that the plot should have, were it this record's, and has not."""
    words = set(re.findall(r"[^<>\n]+(?=</text>)", fill_docs.PLOT.read_text()))
    (members,) = shown_in(record)
    time, *_ = QUANTITIES
    return {line.label for line in lines(record, members, FORWARD, time)} - words


@pytest.mark.parametrize("target", [*targets.TARGETS, *targets.DECODING], ids=lambda t: t.what)
def test_without_a_run_nothing_is_met(target):
    assert target.met({}) == targets.NOT_MEASURED


def test_a_run_without_the_plotted_workloads_is_told(monkeypatch):
    monkeypatch.setattr(fill_docs.plot, "figures", lambda record: {})
    with pytest.raises(ValueError, match=r"expected one with time-attention.*, got quick, layers"):
        fill_docs.plotted({"quick": RECORD, "layers": RECORD})


@pytest.mark.slow
def test_another_record_makes_another_page_and_another_plot(tmp_path, monkeypatch):
    pages, runs = {"page": "<!-- bench -->\n<!-- decode -->"}, fill_docs.evidence()

    def page(record):
        return fill_docs.filled(pages, fill_docs.tables(runs, {"run": record}, {}))["page"]

    made = page(RECORD)
    assert "1.75 [" in made
    assert "<!-- decode -->\nNot yet measured." in made
    slower = bench_record.record(slower={OURS: 1.2})
    assert page(slower) != made
    if importlib.util.find_spec("matplotlib") is None:
        with pytest.raises(ModuleNotFoundError, match="pip install"):
            fill_docs.plot.figures(RECORD)
        return
    figure = fill_docs.plotted({"run": RECORD})
    monkeypatch.setattr(fill_docs, "PLOT", tmp_path / "time.svg")
    fill_docs.plot.save(figure, fill_docs.PLOT)
    assert not differs(RECORD)
    assert differs(slower) >= {"jax-attn  1.46×"}
