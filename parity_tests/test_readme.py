"""The README: its commands, its examples, and its tables as the evidence has them."""

import contextlib
import io
import json
import re
from pathlib import Path

import pytest
import readme as evidence_readme
import torch

from jax_attn.parity.bugs.catalogue import BUGS
from jax_attn.parity.matrix import rows
from jax_attn.parity.training.bugs.trials import CASES_OF_BUGS

HERE = Path(__file__).parent
README = (HERE.parent / "README.md").read_text()


def section(title: str) -> str:
    return README.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_there_are_two_commands_of_one_line_each():
    blocks = re.findall(r"^```\n(.*?)^```", section("Two commands"), re.DOTALL | re.MULTILINE)
    assert [block.count("\n") for block in blocks] == [1, 1]
    assert "jax-attn verify" in blocks[0]
    assert "pytest" in blocks[1]


@pytest.fixture(scope="module")
def told() -> tuple[dict, str]:
    """What the examples name and print: run in order, in one namespace, as a reader would."""
    torch.manual_seed(0)
    namespace: dict = {}
    examples = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    assert len(examples) >= 4
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for example in examples:
            exec(compile(example, "README.md", "exec"), namespace)
    return namespace, printed.getvalue()


def test_every_example_runs(told):
    assert "wq.weight" in told[1]


def test_the_report_shown_is_the_one_that_is_printed(told):
    """Its columns, its tensors and its verdicts; figures differ from machine to machine."""
    namespace, _ = told
    shown = re.search(r"^```\n(FAIL  check.*?)^```", README, re.DOTALL | re.MULTILINE)[1]
    words = re.compile(r"jit +(?:grad )?(?:input )?\S+ +(?:PASS|FAIL)|transform +tensor.*scale")

    def skeleton(text: str) -> list[str]:
        return [" ".join(found.split()) for found in words.findall(text)]

    assert skeleton(shown) == skeleton(str(namespace["result"]))


def written(runs: dict) -> str:
    """The README with these runs of the matrix, and the bench's as they were kept."""
    benchmarks = evidence_readme.benchmarks(), evidence_readme.benchmarks(evidence_readme.CACHED)
    return evidence_readme.written(README, runs, *benchmarks)


def test_the_tables_are_those_of_the_evidence():
    assert written(evidence_readme.evidence()) == README


def test_the_evidence_is_of_the_rows_that_there_are():
    there = {case.name for case in [*rows.matrix(), *rows.emulated()]}
    run = evidence_readme.evidence()["cpu"]
    assert {row[0] for row in run["cases"]} == there
    power = json.loads(evidence_readme.POWER.read_text())["bugs"]
    named = {row for _, rows, *_ in power for row in rows}
    prepared = {"-".join(case.preparation) for case in rows.matrix()}
    assert {name for name in named if not name.startswith(("encoder/", "training/"))} <= prepared
    assert {bug for bug, *_ in power} == {*BUGS, *CASES_OF_BUGS}


def test_that_comparison_can_fail():
    other = evidence_readme.evidence()
    next(iter(other.values()))["summary"]["pass"] += 1
    assert written(other) != README
