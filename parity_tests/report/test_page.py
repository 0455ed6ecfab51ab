"""The page says the verdict first, leaves no case out, runs nothing and fetches nothing."""

import math
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest

from jax_attn.parity.judge.budget import Budget
from jax_attn.parity.judge.compare import judge
from jax_attn.parity.judge.finding import Finding
from jax_attn.parity.judge.result import NotRun, Result
from jax_attn.report.page import Bar, maps, page

ENVIRONMENT = {"python": "3.11.7", "packages": {"jax": "0.10.2"}, "devices": ["cpu: cpu"]}


def tensor(off=0.0, shape=(2, 3, 5, 7), name="weights"):
    want = np.random.default_rng(0).standard_normal(shape)
    got = want.copy()
    got[:, 1, 2:] += off
    budget = Budget(np.full(shape, 1e-6, np.float32), 1e-6, 1e-8, 1e-5, 1e-12)
    return judge(want, got, want, budget, kind="output", name=name, transform="jit")


PASS = Result("float32", "cpu", (tensor(),), name="passed")
WEIGHTS, BLIND = Finding("weights-differ", "weights differ"), Finding("scale", "blind inputs")
FAIL = Result("float32", "cpu", (tensor(1e-3),), name="failed", failures=(WEIGHTS,))
DOUBT = Result("float32", "cpu", (tensor(),), name="doubted", doubts=(BLIND,))
EXPLAINED = replace(
    FAIL,
    explanation={
        "sentence": "The port leaves out the scale.",
        "text": "FAIL  The port leaves out the scale.",
        "regions": [
            {
                "first_wrong": {
                    "ours": {
                        "op": "dot_general",
                        "shape": [2, 3],
                        "module": "",
                        "source": "p.py:3",
                    },
                    "theirs": {
                        "op": "aten.mul",
                        "shape": [2, 3],
                        "module": "q",
                        "source": "r.py:5",
                    },
                },
                "causes": [{"confirmed": True, "sentence": "scale: left out"}],
                "repro": "print(1 < 2)",
            }
        ],
    },
)


class Tags(HTMLParser):
    """Every tag, with its attributes, and whether all that open are closed."""

    VOID = ("meta", "br", "rect")

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.text = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += f" {data}"


@pytest.mark.parametrize(
    ("results", "verdict"),
    [([PASS], "PASS"), ([PASS, DOUBT], "INCONCLUSIVE"), ([PASS, FAIL, DOUBT], "FAIL")],
)
def test_the_verdict_comes_first_and_each_case_has_a_row(results, verdict):
    read = Tags(page(results, ENVIRONMENT))
    assert read.open == []
    body = read.text.split("parity report", 1)[1]  # behind the title of the window
    assert verdict in body.split("Cases")[0]
    rows = [attrs for tag, attrs in read.tags if attrs.get("data-title") == "case"]
    assert len(rows) == len(results)
    for result in results:
        assert all(why in read.text for why in result.reasons)
    names = [result.name for result in (FAIL, DOUBT, PASS) if result in results]
    places = [body.index(name, body.index("ours/torch's")) for name in names]
    assert places == sorted(places)


def test_nothing_is_run_and_nothing_fetched():
    text = page([EXPLAINED, DOUBT], ENVIRONMENT)
    read = Tags(text)
    assert {tag for tag, _ in read.tags} & {"script", "link", "img", "iframe"} == set()
    assert not re.search(r"https?:|url\(|@import", text)
    links = [a["href"] for tag, a in read.tags if tag == "a"]
    ids = {a.get("id") for _, a in read.tags}
    assert all(link.startswith("#") and link[1:] in ids for link in links)


def test_texts_are_no_markup_wherever_they_stand():
    """Every string of a result, an explanation and an environment has a tag in it."""
    bad = '"><script>alert(1)</script>'

    def marked(value):
        if isinstance(value, str):
            return value + bad
        if isinstance(value, dict):
            return {key: marked(each) for key, each in value.items()}
        return [*map(marked, value)] if isinstance(value, list) else value

    failed = replace(
        FAIL,
        name=bad,
        failures=(Finding("weights-differ", bad),),
        notes=(Finding("no-padding", bad),),
        tensors=tuple(replace(t, name=bad) for t in FAIL.tensors),
    )
    shown = replace(EXPLAINED, explanation=marked(EXPLAINED.explanation))
    text = page([failed, shown], {"devices": [bad], "packages": {bad: bad}})
    assert "<script" not in text
    assert text.count("&lt;script&gt;") > 12


def test_a_link_leads_into_the_section_that_it_opens():
    """A browser opens the details around a target, not details that are the target."""
    tags = Tags(page([FAIL], ENVIRONMENT)).tags
    assert not any(tag == "details" and "id" in attributes for tag, attributes in tags)


def test_an_explanation_shows_both_sides():
    text = " ".join(Tags(page([EXPLAINED], ENVIRONMENT)).text.split())
    for part in ("the port dot_general [2, 3] p.py:3", "the reference aten.mul [2, 3]"):
        assert part in text
    for part in ("in q", "r.py:5", "Cause: scale: left out", "print(1 < 2)"):
        assert part in text


def test_a_failed_tensor_is_mapped_head_by_head():
    drawn = [*maps(tensor(1e-3))]
    assert [map_.title for map_ in drawn] == [
        f"weights[:, {head}, :, :], {head + 1} of 3: axes 2 and 3" for head in (1, 0, 2)
    ]
    over = [{cell.y for cell in map_.cells if cell.shade} for map_ in drawn]
    assert over == [{2, 3, 4}, set(), set()]
    text = page([FAIL], ENVIRONMENT)
    assert text.count('role="img"') == 3
    assert 'aria-label="weights[:, 1, :, :], 2 of 3: axes 2 and 3: at most' in text


def test_a_part_of_a_run_and_what_was_not_run_are_said():
    compiled = NotRun("gqa", "forward", "float32", "2x3", "compiled", "TPU v5e")
    text = Tags(page([PASS], ENVIRONMENT, [compiled], planned=3)).text
    assert "INTERRUPTED: 1 of 3 cases" in text
    assert "TPU v5e" in text
    assert "packages" in text
    assert "jax 0.10.2" in text


BARS = {0.0: (0, False), 0.5: (25, False), 1.0: (50, False), 100.0: (75, True), 1e9: (100, True)}


@pytest.mark.parametrize("fraction", [*BARS, math.inf, math.nan])
def test_a_bar_is_half_at_the_budget_and_then_by_decades(fraction):
    bar = Bar.of(fraction)
    expected = {math.inf: (100, True)}.get(fraction, BARS.get(fraction, (0, False)))
    assert (bar.percent, bar.is_over) == expected
