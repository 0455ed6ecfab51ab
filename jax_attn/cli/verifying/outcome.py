"""The outcome of `jax-attn verify`: prints each row when it is judged, then the summary."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from jax_attn.cli.common.outcome import tell
from jax_attn.cli.status import Exit

if TYPE_CHECKING:
    from jax_attn.parity.judge.result import NotRun, Result


@dataclass
class Outcome:
    """The rows judged so far, and what was only compiled or refused; the run may be cut short.

    planned: the names of the rows that a whole run judges, in order. shown: whether to print each
    row as soon as it is judged. left_out: how many more rows `--all` would run.
    """

    planned: Sequence[str]
    shown: bool
    left_out: int = 0
    results: "list[Result]" = field(default_factory=list)
    not_run: "list[NotRun]" = field(default_factory=list)
    interrupted: KeyboardInterrupt | None = None

    def collect(self, items: "Generator[Result] | Generator[Result | NotRun]") -> "Outcome":
        """Take every item as it comes; after Ctrl-C, keep what is judged, or raise if nothing is.

        Sorts both lists, and returns this outcome.
        """
        from jax_attn.parity.judge.result import NotRun

        try:
            for item in items:
                if isinstance(item, NotRun):
                    self.not_run.append(item)
                else:
                    self._judged(item)
        except KeyboardInterrupt as interrupted:
            if not self.results:
                raise
            self.interrupted = interrupted
        finally:
            items.close()
        self.results.sort(key=lambda result: self.planned.index(result.name))
        self.not_run.sort(key=lambda item: (item.design, item.direction))
        return self

    def _judged(self, result: "Result") -> None:
        from jax_attn.parity.judge.text import console
        from jax_attn.report.documents import case_line

        self.results.append(result)
        if self.shown:
            width = max(map(len, self.planned))
            for line in [result] if len(self.results) > 1 else [None, result]:
                console().print(case_line(line, width), highlight=False, soft_wrap=True)

    def present(self, *, report: Path | None, as_json: bool, all_tensors: bool) -> Exit:
        """Write the report, print all that is not yet printed, and return the exit status."""
        from jax_attn import environment
        from jax_attn.parity.judge.compare import Verdict
        from jax_attn.report.documents import compiled_table, missing_part, summary_lines
        from jax_attn.report.result_files import result_files

        results, not_run = self.results, self.not_run
        # A row that its kernel refuses has no verdict, so it must not count as interrupted.
        refused = sum(item.level == "refused" for item in not_run)
        planned = len(self.planned) - (0 if self.interrupted else refused)
        files = result_files(results, environment.describe(), not_run, planned)
        not_passed = [r for r in results if r.verdict is not Verdict.PASS]
        with_reasons = [item for item in not_run if item.level in ("failed", "refused")]
        tell(
            files["result.json"],
            [
                *([compiled_table(with_reasons)] if with_reasons else []),
                *(result.report(all_tensors=all_tensors) for result in not_passed),
                "",
                *missing_part(results, planned),
                *summary_lines(results, not_run),
                *([f"{self.left_out} more cases run with --all"] if self.left_out else []),
            ],
            files=files,
            report=report,
            as_json=as_json,
        )
        if any(item.level == "failed" for item in not_run):
            return Exit.FAIL
        return Exit[Verdict.worst(r.verdict for r in results)]
