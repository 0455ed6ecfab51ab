"""Handle SIGINT and SIGTERM while a command runs: print one line, exit with a shell's status."""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import NamedTuple, NoReturn

from jax_attn.cli.status import Exit

# An exception raised during an import does harm: extension modules turn it into an ImportError,
# lose it, or crash. So the signal is sent again, every AGAIN seconds, until the import has ended;
# after PATIENCE seconds the handler ends the process as it is.
PATIENCE, AGAIN = 1.0, 0.05


class TerminatedError(KeyboardInterrupt):
    """SIGTERM, raised like Ctrl-C so that the same code tidies up."""


class _End(NamedTuple):
    raised: type[KeyboardInterrupt]
    said: str
    status: Exit


_ENDS = {
    signal.SIGINT: _End(KeyboardInterrupt, "interrupted", Exit.INTERRUPTED),
    signal.SIGTERM: _End(TerminatedError, "terminated", Exit.TERMINATED),
}
# The handlers with which Python starts; a parent process may have made it ignore a signal instead.
_UNHANDLED = (signal.SIG_DFL, signal.default_int_handler)


class Signals:
    """The signals of one run of the command line."""

    def __init__(self) -> None:
        self.first: tuple[signal.Signals, float] | None = None
        self.timer: threading.Timer | None = None
        self.leaving = False

    @contextlib.contextmanager
    def raised(self) -> Iterator[None]:
        """Raise signals as exceptions within this context, except during an import."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in _ENDS}
        ours = [number for number, handler in before.items() if handler in _UNHANDLED]
        for number in ours:
            signal.signal(number, self._handle)
        try:
            yield
        finally:
            if self.timer is not None:
                self.timer.cancel()
            for number in ours:
                signal.signal(number, before[number])

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """Exit with the line and status of a signal, whatever its exception was turned into."""
        try:
            yield
        except BaseException as error:
            if self.first is not None:
                self.leaving = True  # ignore the signal if the timer sends it once more
                _leave(self.first[0])
            if isinstance(error, KeyboardInterrupt):
                _leave(signal.SIGINT)
            raise

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.leaving:
            return
        if self.first is None:
            self.first = signal.Signals(number), now
        if not _importing(frame):
            raise _ENDS[self.first[0]].raised
        if now - self.first[1] > PATIENCE:
            end = _ENDS[self.first[0]]
            os.write(2, f"{end.said}\n".encode())
            os._exit(end.status)
        main = threading.main_thread().ident
        self.timer = threading.Timer(AGAIN, signal.pthread_kill, [main, number])
        self.timer.daemon = True
        self.timer.start()


def _importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _leave(number: signal.Signals) -> NoReturn:
    print(_ENDS[number].said, file=sys.stderr)
    sys.exit(_ENDS[number].status)
