"""Calibration: correct configurations pass, wrong ones fail, and any one can be drawn again."""

import io
import json
import math
from collections import Counter
from dataclasses import replace
from math import gcd

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from rich.console import Console

from jax_attn.attention.dispatch import KERNELS
from jax_attn.attention.kernels import dense
from jax_attn.cli import main
from jax_attn.parity.judge.compare import TensorReport, Verdict
from jax_attn.parity.run.modes.perturbed_mode import Perturbed
from jax_attn.selfcheck import process_pool
from jax_attn.selfcheck.calibration import calibrate, report
from jax_attn.selfcheck.calibration.anatomies import ANATOMIES
from jax_attn.selfcheck.calibration.configurations import (
    STRIDE,
    Configuration,
    configurations,
    programs,
)
from jax_attn.selfcheck.calibration.draw import ALLOWED, LIMITS, VALUES, draw
from jax_attn.selfcheck.calibration.report import GATES, PortTrial, figures, quantiles

ONE = "float32-core-gqa-mha-arrays"
SOME = {
    ONE,
    "bfloat16-core-gqa-mha-arrays",
    "float16-blocked-2x3-gqa-mha-window",
    "float64-core-gqa-mha-arrays",
    "float32-module-block-mha-arrays",
    "float32-eager-gated-gqa-arrays",
}
LONG = SOME | {"float32-eager-masked_fill-gqa-arrays", "float64-eager-where-gqa-arrays"}


def compared(names: set[str], each: int) -> list[PortTrial]:
    """The first few of each of these programs."""
    first = configurations(each * len(programs()), seed=0)
    work = process_pool.calibration_tasks([c for c in first if c.program.name in names])
    return [trial for piece in work for trial in piece.function(*piece.arguments)]


@pytest.fixture(scope="module")
def trials(request) -> list[PortTrial]:
    names, each = (LONG, 5) if request.config.getoption("--long") else (SOME, 3)
    found = compared(names, each)
    assert len(found) == len(names) * each
    return found


@pytest.mark.slow
def test_correct_configurations_pass(trials):
    assert {t.name: t.reasons for t in trials if t.verdict is Verdict.FAIL} == {}
    assert report.verdict(trials) is Verdict.PASS, report.summary_lines(trials, seed=0)


@pytest.mark.slow
def test_they_meet_some_of_their_budgets_at_each_gate(trials):
    """A budget of which correct code met nothing would let pass anything."""
    for name, group in report.groups(trials).items():
        for gate, fractions in figures(group)["fractions"].items():
            assert 0.02 <= fractions["largest"] <= 1, (name, gate)


@pytest.mark.slow
def test_planted_bugs_are_tried_where_budgets_serve_any_module_and_most_are_killed(trials):
    found = [t for t in trials if t.planted]
    assert {t.kind for t in found} == {"blocked", "module", "eager"}
    killed = Counter(killed for t in found for killed in t.planted.values())
    assert killed[True] > killed[False]


def run(*args: str):
    return CliRunner().invoke(main, ["calibrate", *args], catch_exceptions=False)


@pytest.mark.slow
def test_the_command_leaves_0_and_writes_what_it_found(tmp_path):
    outcome = run("--configurations", "200", "-k", ONE, "--json", "--report", str(tmp_path))
    assert outcome.exit_code == 0, outcome.stdout
    document = json.loads(outcome.stdout)
    assert document == json.loads((tmp_path / "calibration.json").read_text())
    group = document["groups"]["float32 core"]
    assert (group["configurations"], group["pass"]) == (2, 2)
    assert group["fractions"].keys() == set(GATES)
    assert [len(line) for line in document["configurations"]] == [len(document["columns"])] * 2


@pytest.mark.slow
def test_it_leaves_1_where_the_scale_is_wrong_by_1_percent_and_names_each(monkeypatch):
    right = dense.attention

    def wrong(call):
        return right(replace(call, scale=1.01 * call.scale))

    monkeypatch.setitem(KERNELS, "dense", replace(KERNELS["dense"], run=wrong))
    outcome = run("--configurations", "500", "-k", ONE)
    assert outcome.exit_code == 1
    failed = [line for line in outcome.stdout.splitlines() if line.startswith("FAIL")]
    assert len(failed) >= 3
    assert all(ONE in line and "of seed 0" in line for line in failed)


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (("calibrate", "--design", "gqa"), "No such option"),
        (("calibrate", "--dtype", "int8"), "expected one of"),
        (("calibrate", "-k", "no such program"), "no case matches"),
        (("calibrate", "--configurations", "0"), "0 is not in the range"),
        (
            ("verify", "--calibrate", "--design", "gqa"),
            "--design: goes with the built-in cases or --power, not with --calibrate",
        ),
        (
            ("verify", "--calibrate", "--power"),
            "expected one of --power, --calibrate, got all of them",
        ),
        (("verify", "--calibrate", "--dtype", "int8"), "expected one of"),
    ],
)
def test_what_does_not_go_with_it_is_refused(args, told):
    outcome = CliRunner().invoke(main, args)
    assert outcome.exit_code == 2
    assert told in outcome.stderr


# --- what is drawn --------------------------------------------------------------------------------


def arrays(configuration: Configuration) -> dict[str, np.ndarray]:
    made = draw(configuration)
    reference = calibrate.pair_of(configuration.program).reference
    parameters = [(name, tuple(p.shape)) for name, p in reference.named_parameters()]
    return made.inputs | {name: made.parameter(name, shape) for name, shape in parameters}


def test_a_configuration_is_drawn_again_from_its_seed_and_number_alone():
    first, again, other = (arrays(Configuration(41, seed)) for seed in (3, 3, 4))
    assert first.keys() == again.keys() == other.keys()
    assert all(first[name].tobytes() == again[name].tobytes() for name in first)
    assert any(first[name].tobytes() != other[name].tobytes() for name in first)


@pytest.mark.parametrize(
    ("start", "finer"),
    [
        ("bfloat16-core", "float32-core"),
        ("float16-eager", "float32-eager"),
        ("mxu-core", "float32-core"),
        ("float32-module", "float64-module"),
    ],
)
def test_without_its_cause_it_is_the_same_data_in_a_finer_precision(start, finer):
    one = next(c for c in configurations(100, 0) if c.name.startswith(start))
    other = replace(one, without_cause=True)
    assert other.name == one.name.replace(start, finer)
    first, again = draw(one), draw(other)
    assert first.traits == again.traits
    assert all(np.array_equal(first.inputs[name], again.inputs[name]) for name in first.inputs)


def test_float64_has_no_finer_and_is_drawn_again_as_mild_as_for_the_coarsest():
    peaked = configurations(300, 0, ["float64"])
    milder = [replace(c, without_cause=True) for c in peaked]
    for chosen, mild in ((peaked, False), (milder, True)):
        scores = max(float(draw(c).traits["scores"]) for c in chosen)
        assert (scores <= LIMITS["bfloat16"].scores) == mild
        assert {c.program.dtype for c in chosen} == {"float64"}


def test_its_name_leaves_it_alone_however_many_are_asked_for():
    name = Configuration(417, 0).name
    for count in (418, 2000):
        assert [c.number for c in configurations(count, 0, pattern=name)] == [417]


def test_there_are_a_hundred_programs_and_each_is_drawn_as_often():
    assert len({p.name for p in programs()}) == len(programs()) == 100
    assert gcd(STRIDE, len(programs())) == 1
    drawn_programs = Counter(c.program for c in configurations(300, 0))
    assert set(drawn_programs.values()) == {3}


def test_programs_have_every_precision_kind_and_length():
    assert {p.precision for p in programs()} == set(LIMITS)
    assert {p.kind for p in programs()} == {"core", "blocked", "module", "eager"}
    assert {p.design for p in programs() if p.is_block} == set(ANATOMIES)
    assert {p.shape for p in programs()} == {"mha", "gqa", "mqa", "512", "1024", "2048"}
    emulated = [p for p in programs() if p.unit]
    assert len(emulated) == 5


def test_every_kind_of_values_and_masks_is_drawn():
    traits = [draw(c).traits for c in configurations(300, 0)]
    of_tokens = {f"{mask}, padding tokens" for mask in ("none", "causal")}
    assert {t["values"] for t in traits} == {*VALUES, "tokens"}
    assert {t["mask"] for t in traits} == {*ALLOWED, *of_tokens, "causal_padding", "window"}


@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16"])
def test_what_is_drawn_is_held_by_its_dtype(dtype):
    largest = torch.finfo(getattr(torch, dtype)).max
    for configuration in configurations(400, 0, (dtype,))[::7]:
        for name, a in arrays(configuration).items():
            if a.dtype.kind == "f" and name != "bias":
                assert np.abs(a).max() < largest, (configuration.name, name)


# --- figures --------------------------------------------------------------------------------------


def trial(verdict: Verdict, **changes) -> PortTrial:
    given = {
        "name": "one",
        "number": 1,
        "kind": "core",
        "precision": "float32",
        "gates": dict.fromkeys(GATES, 0.5),
        "traits": {"values": "normal", "mask": "none"},
        "doubts": (),
        "reasons": (),
        "planted": {},
        "seconds": 0.1,
    }
    return PortTrial(verdict=verdict, **given | changes)


@pytest.mark.parametrize(
    ("verdicts", "status"),
    [
        ({Verdict.PASS: 9, Verdict.INCONCLUSIVE: 1}, 0),
        ({Verdict.PASS: 8, Verdict.INCONCLUSIVE: 1}, 4),
        ({Verdict.PASS: 9999, Verdict.FAIL: 1}, 1),
        ({Verdict.INCONCLUSIVE: 9, Verdict.FAIL: 1}, 1),
    ],
)
def test_one_failure_leaves_1_and_more_than_a_tenth_of_doubt_4(verdicts, status, monkeypatch):
    assert status_of(verdicts, Verdict.PASS, monkeypatch) == status


@pytest.mark.parametrize(
    ("without_cause", "status"), [(Verdict.PASS, 0), (Verdict.INCONCLUSIVE, 4), (Verdict.FAIL, 1)]
)
def test_a_doubt_is_true_where_it_goes_with_its_cause(without_cause, status, monkeypatch):
    verdicts = {Verdict.PASS: 99, Verdict.INCONCLUSIVE: 1}
    assert status_of(verdicts, without_cause, monkeypatch) == status


def status_of(verdicts, without_cause, monkeypatch) -> int:
    """What the command leaves; without_cause: the verdict on what was INCONCLUSIVE, at last."""
    found = [v for v, count in verdicts.items() for _ in range(count)]

    def judged(work, processes):
        for piece in work:
            yield (
                piece,
                [
                    trial(without_cause if c.without_cause else found[c.number], number=c.number)
                    for c in piece.arguments[0]
                ],
            )

    monkeypatch.setattr(process_pool, "run", judged)
    return run("--configurations", str(len(found))).exit_code


def test_quantiles_are_values_that_occur():
    assert quantiles(range(1, 201)) == {"median": 100, "90%": 180, "99%": 198, "largest": 200}


@pytest.mark.parametrize("width", [80, 100, 140])
def test_a_terminal_of_80_columns_shows_names_and_counts_whole(width):
    drawn = 10_000 * [trial(Verdict.PASS, precision="bfloat16", kind="blocked")]
    out = io.StringIO()
    Console(file=out, width=width).print(report.table(drawn))
    titles, row = (" ".join(out.getvalue().splitlines()[i].split()) for i in (2, 4))
    assert titles == "precision, kind drawn PASS CLUSIVE FAIL element RMS projection"
    assert row.startswith("bfloat16 blocked 10000 10000 0 0 0.50 0.50")


def test_an_error_where_none_is_allowed_is_an_infinite_fraction():
    exact = TensorReport("output", "y", "jit", Verdict.FAIL, (), (2,), got=1.0, want=0.0, error=0.7)
    exact = replace(exact, allowed=0.0, budget=0.0)
    assert report.fractions(exact) == {"element": math.inf, "RMS": math.inf}
    right = replace(exact, got=0.0, error=0.0)
    assert report.fractions(right) == {"element": 0.0, "RMS": 0.0}


def test_an_infinite_fraction_is_null_in_json():
    gates = dict.fromkeys(GATES, math.inf)
    document = json.loads(report.as_json([trial(Verdict.FAIL, gates=gates)], 0, {}))
    assert document["groups"]["all"]["fractions"]["RMS"]["largest"] is None
    assert document["not_passed"][0]["name"] == "one"


@pytest.mark.slow
def test_a_row_of_one_key_whose_values_cancel_is_no_mistake(monkeypatch):
    """The gradients of its scores are 0, but for what dO·V and dO·O err by."""
    one = [Configuration(766, 0)]
    assert [trial.verdict for trial in calibrate.judged(one)] == ["PASS"]
    monkeypatch.setattr(Perturbed, "_scores_gradient", Perturbed._kernel)
    assert [trial.verdict for trial in calibrate.judged(one)] == ["FAIL"]
