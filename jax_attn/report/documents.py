"""A run of checks as a document: JSON for programs, Markdown for people."""

import json
from collections.abc import Sequence
from typing import Any

from jax_attn.parity.judge.compare import Verdict
from jax_attn.parity.judge.not_run import NotRun
from jax_attn.parity.judge.result import Result
from jax_attn.parity.judge.text import SCHEMA_VERSION
from jax_attn.report.files import RESULT_FILES
from jax_attn.report.summary import summary, summary_lines
from jax_attn.report.tables import COLUMNS, cells


def result_files(
    results: Sequence[Result], environment: dict[str, Any], not_run: Sequence[NotRun] = ()
) -> dict[str, str]:
    """The text of each of `RESULT_FILES`."""
    texts = (render(results, environment, not_run) for render in (as_json, as_markdown))
    return dict(zip(RESULT_FILES, texts, strict=True))


def as_json(
    results: Sequence[Result], environment: dict[str, Any], not_run: Sequence[NotRun] = ()
) -> str:
    """The whole run, by schema version 1."""
    document = {
        "schema_version": SCHEMA_VERSION,
        "environment": environment,
        "summary": summary(results),
        "cases": [result.as_dict() for result in results],
        "compiled": [item.as_dict() for item in not_run],
    }
    return json.dumps(document, indent=1, allow_nan=False)


def as_markdown(
    results: Sequence[Result], environment: dict[str, Any], not_run: Sequence[NotRun] = ()
) -> str:
    """Summary, environment and one table, for a person."""
    lines = ["# Parity report", "", *(f"- {line}" for line in summary_lines(results, not_run)), ""]
    lines += ["## Environment", "", *(f"- {k}: {v}" for k, v in environment.items()), ""]
    lines += ["## Cases", "", f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for result in results:
        _, *rest = cells(result)
        lines.append(f"| {' | '.join((_name(result), *rest))} |")
    not_passed = [result for result in results if result.verdict is not Verdict.PASS]
    if not_passed:
        lines += ["", "## Not passed", ""]
        lines += [f"- {_name(result)}: {why}" for result in not_passed for why in result.reasons]
    if not_run:
        lines += ["", "## Compiled or refused, not run", "", "No verdict: see the level.", ""]
        for item in not_run:
            lines.append(f"- {', '.join(f'{k} {v}' for k, v in item.as_dict().items())}")
    return "\n".join(lines) + "\n"


def _name(result: Result) -> str:
    """A bar, which a test's name may have, would end a table's cell."""
    return result.name.replace("|", r"\|")
