"""README.md and docs/: every block runs and prints what is shown; tables are the evidence's."""

import re

import fill_docs
import measuring
import pytest

from helpers import documents
from helpers.documents import PAGES, ROOT
from jax_attn.families import FAMILIES
from jax_attn.selfcheck.matrix import rows
from jax_attn.selfcheck.power.catalogue import BUGS
from jax_attn.selfcheck.training_bugs.trials import CASES_OF_BUGS

TEXTS = {name: path.read_text() for name, path in PAGES.items()}
WITH_CODE = [name for name, text in TEXTS.items() if documents.blocks(text)]


@pytest.fixture
def reader(tmp_path):
    with documents.session_in(tmp_path) as session:
        yield session


def test_every_page_has_a_description():
    """For llms.txt and search engines, which otherwise show a page's first line, cut off."""
    head = r'---\nmyst:\n  html_meta:\n    description: ".+\."\n---\n'
    without = [p for p in (ROOT / "docs").rglob("*.md") if not re.match(head, p.read_text())]
    assert not without


# --- code -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_CODE)
@pytest.mark.usefixtures("compiled_alone")
def test_every_block_runs_and_prints_what_is_shown(name, reader):
    for block, printed in reader.run(TEXTS[name], name):
        assert documents.agree(block.code, printed), f"{name}:{block.line} prints\n{printed}"


def test_every_block_is_one_that_runs():
    """Or one of the two commands, which the gate runs."""
    of = {
        name: [block.language for block in documents.blocks(text)] for name, text in TEXTS.items()
    }
    assert {language for each in of.values() for language in each} <= {*documents.LANGUAGES}
    assert {name: each.count("bash") for name, each in of.items() if "bash" in each} == {
        "README.md": 2
    }
    fences = {name: len(re.findall(r"^[ >]*```\w", text, re.M)) for name, text in TEXTS.items()}
    assert fences == {name: len(each) for name, each in of.items()}


SHOWN = {
    # what is shown, what is printed -> whether they agree
    ("worst: 0.31 at [2, 3]", "worst: 1e-07 at [11, 0]"): True,
    ("a\n…\nc 1", "a\nb\nb\nc 2"): True,
    ("a\nb", "a\nb\nc"): False,
    ("b\nc", "a\nb\nc"): False,
    ("x PASS 0.3", "x FAIL 0.3"): False,
    ("a\n…", "b\na\nc"): False,
}


@pytest.mark.parametrize("pair", SHOWN)
def test_what_is_shown_is_compared_up_to_figures(pair):
    assert documents.agree(*pair) == SHOWN[pair]


def test_a_block_that_fails_names_its_page_and_line(reader):
    with pytest.raises(ZeroDivisionError) as caught:
        list(reader.run("Text.\n\n```python\n1\n1 / 0\n```\n", "page.md"))
    assert (caught.traceback[-1].path, caught.traceback[-1].lineno + 1) == ("page.md", 5)


def test_a_command_that_fails_is_an_error_unless_its_status_is_shown(reader):
    wrong = "```console\n$ jax-attn inspect nowhere\n…\n```\n"
    with pytest.raises(AssertionError, match="status 2"):
        list(reader.run(wrong, "page.md"))
    told = wrong.replace("…\n", "…\n$ echo $?\n2\n")
    ((block, printed),) = reader.run(told, "page.md")
    assert documents.agree(block.code, printed)


# --- README -----------------------------------------------------------------------------------


def section(title: str) -> str:
    return TEXTS["README.md"].split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_there_are_two_commands_of_one_line_each():
    commands = [b.code for b in documents.blocks(section("Two commands")) if b.language == "bash"]
    assert [command.count("\n") for command in commands] == [1, 1]
    assert "jax-attn verify" in commands[0]
    assert "pytest" in commands[1]


def test_the_readme_is_short():
    assert TEXTS["README.md"].count("\n") <= 200


def test_its_links_lead_somewhere():
    links = re.findall(r"\]\(([\w./-]+)\)", TEXTS["README.md"])
    assert len(links) > 5
    assert [link for link in links if not (ROOT / link).is_file()] == []


def test_every_family_is_on_its_page():
    named = {kind for family in FAMILIES.values() for kind in (family.name, *family.model_types)}
    page = TEXTS["docs/reference/families.md"]
    assert {name for name in named if not re.search(rf"[`, ]{name}[`, \n]", page)} == set()


# --- tables -----------------------------------------------------------------------------------


def written(runs: dict) -> dict[str, str]:
    """Every page with these runs of the matrix, and the other evidence as it was kept."""
    return fill_docs.filled(TEXTS, fill_docs.tables(runs))


@pytest.mark.slow
def test_the_tables_are_those_of_the_evidence():
    assert written(fill_docs.evidence()) == TEXTS


@pytest.mark.slow
def test_every_table_is_on_one_page():
    for name in fill_docs.tables(fill_docs.evidence()):
        assert sum(text.count(f"<!-- /{name} -->") for text in TEXTS.values()) == 1, name


def test_the_evidence_is_of_the_rows_that_there_are():
    there = {case.name for case in [*rows.matrix(), *rows.emulated()]}
    run = fill_docs.evidence()["cpu"]
    assert {row[0] for row in run["cases"]} == there
    power = measuring.kept("power")["bugs"]
    named = {row for _, rows, *_ in power for row in rows}
    prepared = {"-".join(case.preparation) for case in rows.matrix()}
    assert {name for name in named if not name.startswith(("encoder/", "training/"))} <= prepared
    assert {bug for bug, *_ in power} == {*BUGS, *CASES_OF_BUGS}


@pytest.mark.slow
def test_that_comparison_can_fail():
    other = fill_docs.evidence()
    next(iter(other.values()))["summary"]["pass"] += 1
    assert written(other) != TEXTS
