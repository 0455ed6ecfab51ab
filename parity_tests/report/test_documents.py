"""The JSON of results is what its schema says, and so is the page that documents it."""

import json
import math
from dataclasses import fields, replace

import numpy as np
import pytest
from fill_docs import filled

from helpers.documents import PAGES
from helpers.schema_problems import problems
from jax_attn.parity.judge.budget import Budget
from jax_attn.parity.judge.compare import TensorReport, judge
from jax_attn.parity.judge.finding import KINDS, Finding, StandingNote
from jax_attn.parity.judge.result import Result, WeightedFinding
from jax_attn.report import next_steps as steps
from jax_attn.report import schema
from jax_attn.report.documents import as_json, as_markdown, check_as_json

ENVIRONMENT = {
    "python": "3.11.7",
    "packages": {"jax": "0.10.2"},
    "platform": "Linux",
    "processor": "x86",
    "cores": 2,
    "devices": ["cpu: cpu"],
    "jax_default_matmul_precision": "None",
    "jax_enable_x64": "False",
    "xla_flags": "",
}
BUDGET = Budget(np.full((3, 5), 1e-6, np.float32), 1e-6, 1e-8, 1e-5, 1e-12)
WANT = np.random.default_rng(0).standard_normal((3, 5))


def tensor(off=0.0, shape=(3, 5)):
    got = np.resize(WANT + off, shape)
    return judge(WANT, got, WANT, BUDGET, kind="output", name="y", transform="jit")


TAP = {"op": "mul", "shape": [3, 5], "module": "m", "source": "p.py:3", "is_backward": False}
PAIR = {"ours": TAP, "theirs": TAP | {"source": "r.py:5"}}
CAUSE = {
    "name": "scale",
    "sentence": "The port computes what the reference would with another scale.",
    "site": TAP,
    "value": math.inf,
    "confirmed": True,
    "explained": 1.0,
}
REGION = {
    "last_matched": [PAIR],
    "first_wrong": PAIR,
    "worst": {"index": [0, 1], "got": math.nan, "expected": 1.0},
    "equations": [TAP],
    "where": [],
    "again": [PAIR],
    "causes": [CAUSE],
    "repro": "",
}
FOUND = {
    "verdict": "FAIL",
    "sentence": CAUSE["sentence"],
    "stopped": "",
    "regions": [REGION],
    "text": "FAIL",
}
PASS = Result("float32", "cpu", (tensor(),))
FAIL = replace(PASS, tensors=(tensor(1e-3), tensor(shape=(5, 3))))
RESULTS = {
    "PASS with notes": replace(
        PASS, notes=(Finding("scope", "what ran"), StandingNote("precision-pinned", "pinned"))
    ),
    "FAIL": FAIL,
    "FAIL explained": replace(FAIL, explanation=FOUND),
    "weights": replace(PASS, failures=(Finding("weights-differ", "q.weight"),)),
    "doubts": replace(
        PASS, doubts=(Finding("window", "hidden"), Finding("reference-errs", "it errs"))
    ),
    "doubts by a golden reference": replace(
        PASS,
        doubts=(Finding("window", "hidden"), Finding("gradients-off", "not compared")),
        notes=(StandingNote("golden-reference", "judged by it"),),
    ),
    "nothing compared": replace(PASS, tensors=()),
}
NEXT = {
    "PASS with notes": [],
    "FAIL": ["nothing"],
    "FAIL explained": ["port"],
    "weights": ["weights"],
    "doubts": ["inputs", "reference"],
    "doubts by a golden reference": ["inputs", "reference"],
    "nothing compared": [],
}


@pytest.mark.parametrize("name", RESULTS)
def test_one_check_and_a_run_of_checks_are_what_the_schema_says(name):
    result = RESULTS[name]
    one = json.loads(check_as_json(result, ENVIRONMENT, "jax-attn check mine.py:make"))
    run = json.loads(as_json([result], ENVIRONMENT))
    assert [*problems(one, "check"), *problems(run, "run")] == []
    (case,) = run["cases"]
    assert case == {k: v for k, v in one.items() if k not in ("schema", "next", "environment")}
    assert [step["change"] for step in one["next"]] == NEXT[name]
    if "golden" in name:
        assert all(step["sentence"].startswith("capture again") for step in one["next"])


DEPARTURES = {
    "a key too many": lambda d: d | {"more": 1},
    "a key too few": lambda d: {k: v for k, v in d.items() if k != "verdict"},
    "another type": lambda d: d | {"reasons": [3]},
    "deep inside": lambda d: d | {"findings": [{"weight": "note", "kind": "scope"}]},
}


@pytest.mark.parametrize("name", DEPARTURES)
def test_a_departure_from_the_schema_is_seen(name):
    document = json.loads(check_as_json(FAIL, ENVIRONMENT, ""))
    assert len([*problems(DEPARTURES[name](document), "check")]) == 1


def test_every_field_is_in_the_schema():
    of_tensor = {f.name for f in fields(TensorReport)} - {"heat"} | {"ratio"}
    assert schema.OBJECTS["tensor"].keys() == of_tensor
    assert tuple(schema.OBJECTS["finding"]) == WeightedFinding._fields
    assert tuple(schema.OBJECTS["step"]) == steps.NextStep._fields


def test_the_page_shows_the_schema():
    text = PAGES["docs/reference/json.md"].read_text()
    assert schema.tables() in text
    assert filled({"page": text}, {"schema": schema.tables()})["page"] == text


def test_what_decides_a_doubt_is_known_of_kinds_that_there_are():
    assert {*steps._OF_DOUBTS} <= {*KINDS}
    assert {*steps._OF_DOUBTS.values()} <= {*steps._TO_DECIDE}


def test_a_summary_says_the_cause_before_the_reasons():
    text = as_markdown([RESULTS["FAIL explained"], PASS], ENVIRONMENT)
    assert text.index(CAUSE["sentence"]) < text.index("over budget")


def test_a_report_says_the_cause_before_the_tensors():
    text = str(replace(FAIL, explanation=FOUND | {"text": CAUSE["sentence"]}))
    assert text.index("another scale") < text.index("over budget") < text.index("ours/torch's")
