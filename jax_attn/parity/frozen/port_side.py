"""The judge's side of a port's process: it starts it, asks it, and ends all that it started."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from jax_attn.environment import free_memory
from jax_attn.parity.frozen.descendants import (
    Descendants,
    adopting_orphans,
    children,
    out_of_reach,
)
from jax_attn.parity.frozen.messages import MessageError, TooSlowError, receive, send
from jax_attn.parity.judge.text import joined
from jax_attn.parity.pair.errors import MissingModuleError, PairError
from jax_attn.transfer.problems import printable

_PROGRAM = """
import sys
sys.path[:] = sys.argv[2].split("\\n")
from jax_attn.parity.frozen.port_process import main
main(int(sys.argv[1]))
"""
_LONGEST_LINE = 2**16
_ENDS_WITHIN, _OTHERS_END_WITHIN = 60.0, 5.0
"""Seconds in which a port's process ends by itself, and then all that it started."""


class PortProcess:
    """The process in which a user's file is run; nothing of it is left after the context.

    named: as in `FILE.py:FUNCTION`. seconds: how long its answers may take, all together. What the
    process prints goes to stderr, each line after the name of its file.
    """

    def __init__(self, named: str, seconds: float) -> None:
        self.named = named
        self._seconds = self._left = seconds
        self._ends = contextlib.ExitStack()
        # The bytes, the message in them and its arrays are held at once.
        self._limit = None if (free := free_memory()) is None else free // 4

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as ends:
            ends.enter_context(adopting_orphans())
            ends.enter_context(out_of_reach())
            known = children()
            self._channel, theirs = socket.socketpair()
            ends.callback(self._channel.close)
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _PROGRAM, str(theirs.fileno()), "\n".join(sys.path)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                    # A compiled file stands for any source of its size and its second.
                    env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
                )
            self._all = Descendants(self._process.pid, known)
            output = self._process.stdout
            self._relay = threading.Thread(target=_relay, args=(output, self.named), daemon=True)
            self._relay.start()
            ends.callback(self._end)
            self._ends = ends.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ends.close()

    def ask(self, question: str, *args: Any) -> Any:
        """Return the answer, which may be anything that a message may hold.

        Raises PairError if the port refuses or raises, or if there is no answer that can be read;
        MemoryError if its memory runs out.
        """
        begun = time.monotonic()
        try:
            send(self._channel, (question, args), seconds=self._left)
            left = self._left - (time.monotonic() - begun)
            reply = receive(self._channel, seconds=left, limit=self._limit)
        except MessageError as error:
            raise self._unanswered(error) from error
        finally:
            self._left -= time.monotonic() - begun
        match reply:
            case ("answer", answer):
                return answer
            case ("refused", (str(message), str(module))):
                raise self.refusal(message, module)
            case ("memory", str(message)):
                raise MemoryError(printable(message))
        raise self.wrong("an answer", reply)

    def refusal(self, message: str, module: str) -> PairError:
        """Return the error in whose words the process refuses. module: one not installed, or ""."""
        # Each further line is marked, as one that it prints, so that it is no line of ours.
        lines = f"\n{_place(self.named)}: ".join(map(printable, message.split("\n")))
        return MissingModuleError(lines, module) if module else PairError(lines)

    def leave(self) -> None:
        """Let the process end. Raises PairError if it, or one that it started, does not."""
        self._channel.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_ENDS_WITHIN)
        if left := self._all.left(_OTHERS_END_WITHIN):
            raise PairError(
                f"{self.named}: expected that nothing of it runs after its last answer, got the "
                f"processes {_numbers(left)} still running; they are ended now"
            )

    def wrong(self, expected: str, got: Any) -> PairError:
        """Return the error for an answer of another kind."""
        shown = printable(repr(got))
        shown = shown if len(shown) < 200 else f"{shown[:200]} …"
        return PairError(f"{self.named}: expected its process to hand back {expected}, got {shown}")

    def _unanswered(self, error: MessageError) -> PairError:
        """Return the error for a process that ended, hangs, or writes something else."""
        if isinstance(error, TooSlowError):
            return PairError(
                f"{self.named}: expected its answers within {self._seconds:.0f} s in all, got none "
                "by then; if the port needs longer, pass --timeout"
            )
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        status = self._process.returncode
        if status is None:
            return PairError(f"{self.named}: expected an answer of its process, which {error}")
        how = f"killed by signal {-status}" if status < 0 else f"ended with status {status}"
        return PairError(f"{self.named}: expected an answer of its process, which was {how}")

    def _end(self) -> None:
        """End the process and all that it started. Raises PairError if one of them still runs."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()
        left = self._all.kill()
        self._relay.join(1.0)  # what is written ends with the last process
        if left:
            raise PairError(
                f"{self.named}: expected that its processes end when they are killed, got "
                f"{_numbers(left)} still running; end them before you check again"
            )


def _place(named: str) -> str:
    """Return the name of the file in `FILE.py:FUNCTION`."""
    return Path(named.rpartition(":")[0]).name


def _numbers(processes: frozenset[int]) -> str:
    return joined([str(abs(number)) for number in sorted(processes)])


def _relay(output: IO[bytes], named: str) -> None:
    """Write each line to stderr, after the name of the file, so that it is no line of ours."""
    place = _place(named)
    with output, contextlib.suppress(OSError, ValueError):  # this process may close its stderr
        for line in iter(partial(output.readline, _LONGEST_LINE), b""):
            text = printable(line.decode(errors="replace").rstrip())
            print(f"{place}: {text}", file=sys.stderr, flush=True)
