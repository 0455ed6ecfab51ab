"""A result's report: reasons first, then the worst tensors, then the notes."""

import pickle
from dataclasses import replace

import pytest

from jax_attn.parity.judge.compare import TensorReport, Verdict
from jax_attn.parity.judge.finding import Finding, StandingNote
from jax_attn.parity.judge.result import ParityError, Result
from jax_attn.parity.judge.text import plain


def tensor(i, verdict=Verdict.PASS, fraction=None):
    reasons = () if verdict is Verdict.PASS else (Finding("over-budget", f"planted {i}"),)
    share = i / 100 if fraction is None else fraction
    return TensorReport("output", f"y{i:02}", "jit", verdict, reasons, (2, 3), share, 1.0, 1.0, 1.0)


WEIGHT, BLIND = Finding("weights-differ", "a weight"), Finding("scale", "blind")
NOTES = (StandingNote("scope", "so"), Finding("no-padding", "a note"))


def result(tensors, **others):
    return Result("float32", "cpu", tuple(tensors), notes=NOTES, **others)


PASSING = [tensor(i) for i in range(13)]
FAILING = [tensor(20 + i, Verdict.FAIL, 3.0 + i) for i in range(11)]
# tensors -> those that are listed, in order; what is said of the others.
LISTED = {
    "all pass": (
        PASSING,
        range(12, 2, -1),
        "… and 3 more: pass; --all-tensors, or report(all_tensors=True), shows them",
    ),
    "one fails": (
        [*PASSING, FAILING[0]],
        [20, *range(12, 3, -1)],
        "… and 4 more: pass; --all-tensors, or report(all_tensors=True), shows them",
    ),
    "more fail than are listed": (
        [*PASSING, *FAILING],
        range(30, 20, -1),
        "… and 14 more: 1 fail and 13 pass; --all-tensors, or report(all_tensors=True), shows them",
    ),
    "ten": (PASSING[:10], range(10), ""),
}


@pytest.mark.parametrize("name", LISTED)
def test_the_ten_worst_are_listed_and_what_became_of_the_others_is_said(name):
    tensors, listed, said = LISTED[name]
    lines = str(result(tensors)).splitlines()
    assert [
        line.split()[1] for line in lines if " y" in line and line.strip().startswith("jit")
    ] == [f"y{i:02}" for i in listed]
    assert (said in lines) if said else not any("more" in line for line in lines)
    everything = plain(result(tensors).report(all_tensors=True))
    assert all(t.name in everything for t in tensors)
    assert "--all-tensors" not in everything


def test_reasons_come_before_the_table_those_for_fail_first_and_notes_after_it():
    shown = result([*PASSING, *FAILING], failures=(WEIGHT,), doubts=(BLIND,))
    places = [
        str(shown).index(text)
        for text in ("FAIL  check", "- a weight", "- jit y30: planted", "- blind", "error/budget")
    ]
    assert places == sorted(places)
    assert str(shown).rstrip().endswith("note: a note")
    assert "planted 20" not in str(shown), "it is not among the ten"
    assert len(shown.reasons) == 2 + len(FAILING)
    assert set(shown.as_dict()["tensors"]) == {t.label for t in shown.tensors}, (
        "JSON holds them all"
    )
    with pytest.raises(ParityError, match="planted 20"):
        shown.raise_for_status(all_tensors=True)


# a result -> its gist.
GISTS = {
    "jit y30, 13 of its budget": result([*PASSING, *FAILING], failures=(WEIGHT,)),
    "a weight": result(PASSING, failures=(WEIGHT,)),
    "blind": result(PASSING, doubts=(BLIND,)),
    "nothing differs": result(PASSING),
}


@pytest.mark.parametrize("gist", GISTS)
def test_the_gist_is_the_tensor_that_decides_or_else_the_first_reason(gist):
    assert GISTS[gist].gist == gist


def test_programs_read_every_finding_with_its_kind_and_its_weight():
    doubtful = tensor(40, Verdict.INCONCLUSIVE)
    told = result([FAILING[0], doubtful], failures=(WEIGHT,), doubts=(BLIND,))
    assert [tuple(finding) for finding in told.findings] == [
        ("failure", "weights-differ", "a weight"),
        ("failure", "over-budget", "jit y20: planted 20"),
        ("doubt", "scale", "blind"),
        ("doubt", "over-budget", "jit y40: planted 40"),
        ("note", "no-padding", "a note"),
        ("standing note", "scope", "so"),
    ]
    assert {*told.reasons, *told.notes} == {f.sentence for f in told.findings}
    first, *_ = told.as_dict()["findings"]
    assert first == {"weight": "failure", "kind": "weights-differ", "sentence": "a weight"}
    strict = [(f.weight, f.kind) for f in result(PASSING).strict().findings]
    assert strict == [("doubt", "no-padding"), ("standing note", "scope")]


def test_a_pickled_result_drops_its_modules_and_says_which_call_explains_it():
    here = result([*PASSING, *FAILING], explainer=lambda _: "explained")
    assert here.explain() == "explained"
    again = pickle.loads(pickle.dumps(here))
    assert (again.findings, again.explainer) == (here.findings, None)
    with pytest.raises(ValueError, match=r"call parity\.explain\(reference, port, inputs, …\)"):
        again.explain()


IMITATION = f"{'o' * 130} PASS:mine.py:make\nPASS  mine.py:make"


IMITATING = {
    "a note": {"notes": (Finding("scope", IMITATION),)},
    "a reason": {"failures": (Finding("weights-differ", IMITATION),)},
    "an explanation": {"explanation": {"text": IMITATION.splitlines()[0]}},
}


@pytest.mark.parametrize("where", IMITATING)
def test_text_that_quotes_a_port_does_not_begin_a_line(where):
    failing = Result("float32", "cpu", tuple(FAILING[:1]))
    shown = str(replace(failing, **IMITATING[where])).splitlines()
    assert [line for line in shown if line.startswith("PASS")] == []
    assert len([line for line in shown if line.lstrip().startswith("PASS")]) > 0
