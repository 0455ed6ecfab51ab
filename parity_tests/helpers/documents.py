"""README.md and the pages of docs/: their code blocks, run in order as a reader would run them.

    python -m helpers.documents   # from parity_tests/: write the outputs that the pages show anew

A page is one session. ```python blocks run in one namespace; one that begins with a comment such as
`# test_port.py` is saved under that name instead. A ```text block is what the block before it
prints. In ```console blocks, lines that begin with `$ ` are commands, the others what they print.
Shown outputs are compared up to their figures and line ends; … stands for words left out.
"""

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import NamedTuple

from click.testing import CliRunner

from jax_attn.cli import main

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = {str(p.relative_to(ROOT)): p for p in (README, *sorted((ROOT / "docs").rglob("*.md")))}
BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LANGUAGES = ("python", "console", "text", "bash")
"""bash: README's two commands, which the gate runs."""

_FILE = re.compile(r"# ([\w.]+\.py)\n")
_NUMBER = re.compile(r"[-+±]?\d[\d.,]*(?:e[-+]?\d+)?")
_ASSIGNMENT = re.compile(r"(\w+)=\$\((.*)\)")
_LEFT_OUT = "…"
_WIDTH = "88"


class Block(NamedTuple):
    """A fenced block. line: of its first line of code, in its page."""

    language: str
    code: str
    line: int


def blocks(page: str) -> list[Block]:
    """The fenced blocks of code of a page; those of directives are not code."""
    return [
        Block(found[1], found[2], page.count("\n", 0, found.start()) + 2)
        for found in BLOCK.finditer(page)
        if not found[1].startswith("{")
    ]


@dataclass
class Session:
    """What a reader who follows a page has: names, and the working directory.

    variables: what commands such as `NAME=$(jax-attn …)` print on stdout. status: that of the last
    command.
    """

    names: dict = field(default_factory=lambda: {"__name__": "__main__"})
    variables: dict[str, str] = field(default_factory=dict)
    status: int = 0

    def run(self, page: str, name: str) -> Iterator[tuple[Block, str]]:
        """Each block that shows an output, and what was printed instead."""
        printed = ""
        for block in blocks(page):
            match block.language:
                case "python":
                    printed = self._python(block, name)
                case "console":
                    printed = "".join(self._console(block))
                    yield block, printed
                case "text":
                    yield block, printed

    def _python(self, block: Block, name: str) -> str:
        if file := _FILE.match(block.code):
            Path(file[1]).write_text(block.code)
            return ""
        # As many lines before it as in the page, so that a traceback names the page's.
        code = compile("\n" * (block.line - 1) + block.code, name, "exec")
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(code, self.names)
        return out.getvalue()

    def _console(self, block: Block) -> Iterator[str]:
        commands = [line for line in block.code.splitlines() if line.startswith("$ ")]
        for i, command in enumerate(commands):
            yield f"{command}\n"
            line = Template(command.removeprefix("$ ")).safe_substitute(self.variables)
            name, line = found.groups() if (found := _ASSIGNMENT.fullmatch(line)) else ("", line)
            program, *arguments = shlex.split(line)
            asked = i + 1 < len(commands) and commands[i + 1] == "$ echo $?"
            match program:
                case "jax-attn":
                    done = CliRunner(env={"COLUMNS": _WIDTH}).invoke(
                        main, arguments, prog_name=program
                    )
                    self.status = done.exit_code
                    self.variables |= {name: done.stdout.strip()} if name else {}
                    yield done.stderr if name else done.output
                    assert asked or not self.status, (
                        f"{command}: status {self.status}\n{done.output}"
                    )
                case "pytest":
                    yield _pytest(arguments)
                case "echo":
                    yield f"{self.status}\n"
                case _:
                    raise AssertionError(f"{command}: expected jax-attn, pytest or echo")


def agree(shown: str, printed: str) -> bool:
    """Whether the words that are shown are those that are printed, figures and line ends aside."""
    words = (r"(?:\S+ )*?" if w == _LEFT_OUT else f"{re.escape(w)} " for w in _words(shown))
    return re.fullmatch("".join(words), "".join(f"{w} " for w in _words(printed))) is not None


def _words(text: str) -> list[str]:
    return [word for word in _NUMBER.sub("#", text).split() if set(word) != {"─"}]


def rewritten(page: str, name: str, session: Session) -> str:
    """The page with the outputs that it shows in full as they are printed now."""
    for block, printed in session.run(page, name):
        if _LEFT_OUT not in _words(block.code) and not agree(block.code, printed):
            lines = (_folded(line.rstrip()) for line in printed.strip("\n").splitlines())
            fence = f"```{block.language}\n"
            page = page.replace(f"{fence}{block.code}```", "\n".join([fence[:-1], *lines, "```"]))
    return page


def _folded(line: str) -> str:
    """A long line that is no row of a table, on several."""
    is_table = "  " in line.strip() or " " not in line.strip()
    return line if is_table else textwrap.fill(line, 100, break_long_words=False)


def _pytest(arguments: Sequence[str]) -> str:
    """What pytest prints in a process of its own, which no pytest around it knows of."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
    command = [sys.executable, "-m", "pytest", *arguments]
    return subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True).stdout


@contextlib.contextmanager
def session_in(folder: Path) -> Iterator[Session]:
    """A session in a folder of its own, whose modules nobody else imports."""
    try:
        with contextlib.chdir(folder):
            yield Session()
    finally:
        for name, module in list(sys.modules.items()):
            if (getattr(module, "__file__", None) or "").startswith(str(folder)):
                del sys.modules[name]


if __name__ == "__main__":
    for page_name, path in PAGES.items():
        with tempfile.TemporaryDirectory() as made, session_in(Path(made)) as session:
            new = rewritten(path.read_text(), page_name, session)
        path.write_text(new)
