"""Say what cannot be translated, and where torch's source says it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import Node

from jax_attn.translate.tracing.source.frames import innermost

_INSTALLED = re.compile(r"^.*[/\\](site|dist)-packages[/\\]")


@dataclass(frozen=True)
class Unsupported:
    """Hold one thing that cannot be translated.

    Attributes:
      kind: a word for programs: "input", "module", "size", "operator", "data-dependent size",
        "random", "buffer", "autocast", "alias", "export".
      operator: the operator, input or buffer concerned.
      reason: a sentence for people.
      file: the file of the reference's source, empty if it is not known.
      line: the line in it, 0 if it is not known.
      text: the source line.
    """

    kind: str
    operator: str
    reason: str
    file: str = ""
    line: int = 0
    text: str = ""

    @property
    def source(self) -> str:
        """Return the path of the file, in an installed package that from the package on."""
        return _INSTALLED.sub("", self.file)

    def __str__(self) -> str:
        place = f"\n    {self.source}:{self.line}: {self.text}" if self.file else ""
        return f"{self.operator}: {self.reason}{place}"


def problem_at(node: Node, kind: str, name: str, reason: str) -> Unsupported:
    """Return a problem with the source line of an operator."""
    frame = innermost(node)
    return Unsupported(kind, name, reason, frame.file, frame.line, frame.text if frame.file else "")


class TranslationError(ValueError):
    """Refuse a module that cannot be translated; `problems` lists every reason."""

    def __init__(self, problems: Sequence[Unsupported]) -> None:
        self.problems = tuple(dict.fromkeys(problems))
        super().__init__(
            "cannot translate this module:\n" + "\n".join(f"- {each}" for each in self.problems)
        )
