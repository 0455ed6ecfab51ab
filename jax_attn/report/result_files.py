"""The report files of a run of checks: JSON, Markdown and HTML."""

from collections.abc import Sequence
from typing import Any

from jax_attn.parity.judge.result import NotRun, Result
from jax_attn.report.documents import as_json, as_markdown
from jax_attn.report.files import RESULT_FILES
from jax_attn.report.page import page


def result_files(
    results: Sequence[Result],
    environment: dict[str, Any],
    not_run: Sequence[NotRun] = (),
    planned: int = 0,
) -> dict[str, str]:
    """Return the text of each of `RESULT_FILES`. planned: the number of rows of a whole run."""
    renders = (as_json, as_markdown, page)
    texts = (render(results, environment, not_run, planned) for render in renders)
    return dict(zip(RESULT_FILES, texts, strict=True))
