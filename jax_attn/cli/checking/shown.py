"""Show the result of `jax-attn check`: as text, as JSON, and as files."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from jax_attn.cli.common.outcome import tell

if TYPE_CHECKING:
    from jax_attn.parity.judge.result import Result


@dataclass(frozen=True)
class Forms:
    """The forms that are asked for. report: the folder of files, if any."""

    report: Path | None
    as_json: bool
    all_tensors: bool

    def show(self, result: "Result", command: str) -> None:
        """Write the report's files, and print the result. command: the line that asked for it."""
        from jax_attn.report.next_steps import next_steps

        files = _files(result, command)
        tell(
            files["result.json"],
            [
                result.report(all_tensors=self.all_tensors),
                *(f"next: {step.sentence}" for step in next_steps(result, command)),
            ],
            files=files,
            report=self.report,
            as_json=self.as_json,
        )

    def write(self, result: "Result", command: str) -> None:
        """Write only the report's files."""
        if self.report is not None:
            from jax_attn.report.files import write

            write(self.report, _files(result, command))


def _files(result: "Result", command: str) -> dict[str, str]:
    """Return the text of each file of the report; the JSON is also what `--json` prints."""
    from jax_attn import environment
    from jax_attn.report.documents import check_as_json
    from jax_attn.report.result_files import result_files

    described = environment.describe()
    files = result_files([result], described)
    return files | {"result.json": check_as_json(result, described, command)}
