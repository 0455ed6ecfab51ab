"""Show the result of `jax-attn check`: as text, as JSON, and as files."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from jax_attn.cli.checking.request import Judged
from jax_attn.cli.common.outcome import tell

if TYPE_CHECKING:
    from jax_attn.parity.judge.result import Result
    from jax_attn.parity.judge.text import Hanging


@dataclass(frozen=True)
class Forms:
    """The forms that are asked for. report: the folder of files, if any."""

    report: Path | None
    as_json: bool
    all_tensors: bool

    def show(self, judged: Judged, command: str) -> None:
        """Write the report's files, and print the result. command: the line that asked for it."""
        tell(
            _document(judged, command) if self.as_json else "",
            [
                judged.result.report(all_tensors=self.all_tensors),
                *_next_lines(judged.result, command),
            ],
            files={} if self.report is None else _files(judged, command),
            report=self.report,
            as_json=self.as_json,
        )

    def show_changes(self, judged: Judged, command: str, changes: Sequence[str]) -> None:
        """Write the report's files, and print what changed since the result before."""
        tell(
            "",
            [
                f"{judged.result.verdict}: {judged.result.gist}",
                *(changes or ["nothing moved"]),
                *_next_lines(judged.result, command),
            ],
            files={} if self.report is None else _files(judged, command),
            report=self.report,
            as_json=False,
        )


def _next_lines(result: "Result", command: str) -> list["Hanging"]:
    from rich.text import Text

    from jax_attn.parity.judge.text import Hanging
    from jax_attn.report.next_steps import next_steps

    return [Hanging(Text(f"next: {step.sentence}")) for step in next_steps(result, command)]


def _document(judged: Judged, command: str) -> str:
    from jax_attn.environment import describe
    from jax_attn.report.documents import check_as_json

    return check_as_json(judged.result, describe(judged.jax_part), command)


def _files(judged: Judged, command: str) -> dict[str, str]:
    """Return the text of each file of the report; the JSON is also what `--json` prints."""
    from jax_attn.environment import describe
    from jax_attn.report.result_files import result_files

    files = result_files([judged.result], describe(judged.jax_part))
    return files | {"result.json": _document(judged, command)}
